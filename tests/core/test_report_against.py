"""One report against another: figures, what only one has, and hosts that are unequal."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from vbpipe.cli.report import render_comparison
from vbpipe.errors import UsageError
from vbpipe.report import against_markdown, as_markdown, compare_reports

HOST = {"processor": "P", "flags": "avx2", "cores": "2 of 2", "quota": "none", "kernel": "Linux 6.1"}
DIFFERENCE = "cpu: cores: 2 of 2 here, 8 of 8 there"


def report(rows: dict[str, dict[str, float]], *, reach: float = 0.0, **host: str) -> dict[str, Any]:
    """Row name to scenario to speed-up, whose interval reaches `reach` to each side on the log scale."""

    def ratio(value: float) -> dict[str, Any]:
        low, high = value * math.exp(-reach), value * math.exp(reach)
        return {"value": value, "low": low, "high": high, "groups": 8, "verdict": "faster"}

    made = {name: {"ratios": {s: ratio(value) for s, value in of_one.items()}} for name, of_one in rows.items()}
    verdict = {"host": {**HOST, **host}, "rows": made}
    return {"report": 1, "recipe": {"name": "m"}, "targets": {"cpu": {"threads": 1, "verdict": verdict}}}


def kept(path: Path, body: dict[str, Any]) -> Path:
    path.write_text(json.dumps(body))
    return path


def test_each_step_and_scenario_has_its_quotient_with_the_combined_interval() -> None:
    here = report({"eager": {}, "a": {"s": 2.0, "t": 3.0}}, reach=0.03)
    there = report({"eager": {}, "a": {"s": 1.6, "t": 3.0}}, reach=0.04)
    found = compare_reports(here, there)
    (grid,) = found.grids
    low, high = 1.25 * math.exp(-0.05), 1.25 * math.exp(0.05)
    cells = [cell.text for cell in grid.rows[0]]
    assert cells[:2] == ["a", "s"]
    assert cells[2].startswith("2.000x [")
    assert cells[3].startswith("1.600x [")
    assert cells[4] == f"1.250x [{low:.3f}, {high:.3f}]"
    assert len(grid.rows) == 2
    assert (found.notes, found.differs, found.banner) == ((), (), "")


def test_what_only_one_report_has_is_said() -> None:
    found = compare_reports(report({"a": {"s": 2.0}, "b": {"s": 2.0}}), report({"a": {"s": 2.0, "t": 1.0}}))
    assert found.notes == ("measured only here: b at s on cpu.", "measured only there: a at t on cpu.")
    more = report({"a": {"s": 2.0}})
    more["targets"]["gpu"] = {"threads": 1, "verdict": None}  # judged on neither side
    assert compare_reports(more, report({"a": {"s": 2.0}})).notes == ()


def test_a_target_that_only_one_side_has_judged_is_said_to_be_so() -> None:
    more = report({"a": {"s": 2.0}})
    more["targets"]["gpu"] = more["targets"]["cpu"]
    less = report({"a": {"s": 2.0}})
    less["targets"]["gpu"] = {"threads": 1, "verdict": None}
    assert compare_reports(more, less).notes == ("judged only here: target gpu.",)
    assert compare_reports(less, more).notes == ("judged only there: target gpu.",)


def test_reports_of_different_recipes_are_not_compared() -> None:
    other = {**report({"a": {"s": 2.0}}), "recipe": {"name": "other"}}
    with pytest.raises(UsageError, match="different recipes: 'm' here, 'other' there"):
        compare_reports(report({"a": {"s": 2.0}}), other)


def test_a_step_with_one_group_has_no_interval() -> None:
    here = report({"a": {"s": 2.0}})
    here["targets"]["cpu"]["verdict"]["rows"]["a"]["ratios"]["s"] |= {"low": 0.0, "high": 1e9, "groups": 1}
    (grid,) = compare_reports(here, report({"a": {"s": 1.0}})).grids
    assert [cell.text for cell in grid.rows[0]][2:] == [
        "2.000x, no interval",
        "1.000x [1.000, 1.000]",
        "2.000x, no interval",
    ]


def test_reports_without_a_target_in_common_are_refused() -> None:
    other = report({"a": {"s": 2.0}})
    other["targets"] = {"gpu": other["targets"]["cpu"]}
    with pytest.raises(UsageError, match="no judged target in common: cpu here, gpu there"):
        compare_reports(report({"a": {"s": 2.0}}), other)
    with pytest.raises(UsageError, match="not laid out as a report"):
        compare_reports(report({"a": {"s": 2.0}}), {"report": 1})


def test_unequal_hosts_are_refused_and_what_differs_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = kept(tmp_path / "a.json", report({"a": {"s": 2.0}}))
    there = kept(tmp_path / "b.json", report({"a": {"s": 1.6}}, cores="8 of 8", kernel="another"))
    with pytest.raises(UsageError, match="--across-hosts prints them all the same") as caught:
        render_comparison(here, there, "table", None, across_hosts=False)
    assert caught.value.exit_code == 2
    assert f"measured on unequal hosts: {DIFFERENCE}." in str(caught.value)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("form", ["table", "markdown"])
def test_across_hosts_the_comparison_is_under_a_banner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    here = kept(tmp_path / "a.json", report({"a": {"s": 2.0}}))
    there = kept(tmp_path / "b.json", report({"a": {"s": 1.6}}, cores="8 of 8"))
    render_comparison(here, there, form, None, across_hosts=True)
    out = capsys.readouterr().out
    assert "UNEQUAL HOSTS" in out
    assert out.index(DIFFERENCE) < out.index("1.250x")


def test_equal_hosts_need_no_banner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = kept(tmp_path / "a.json", report({"a": {"s": 2.0}}))
    render_comparison(path, path, "table", None, across_hosts=False)
    out = capsys.readouterr().out
    assert "1.000x [1.000, 1.000]" in out
    assert "UNEQUAL" not in out
    render_comparison(path, path, "markdown", tmp_path / "out.md", across_hosts=False)
    assert "| a | s |" in (tmp_path / "out.md").read_text()
    for form in ("junit", "json", "figures"):
        with pytest.raises(UsageError, match="Use one of table, markdown"):
            render_comparison(path, path, form, None, across_hosts=False)
    with pytest.raises(UsageError, match="Use --format markdown"):
        render_comparison(path, path, "table", tmp_path / "out", across_hosts=False)


def test_names_from_a_model_are_escaped() -> None:
    here = report({"a|<b>": {"s": 2.0}})
    assert "a\\|&lt;b&gt;" in against_markdown(compare_reports(here, here), "m")


def test_the_markdown_of_a_report_says_where_it_was_measured() -> None:
    verdict = {
        "host": HOST, "scenarios": [], "rows": {}, "gated": [], "variants": {}, "shipped": None, "problems": [],
        "gpu": "none seen", "libraries": {"numpy": "2.1", "torch": "2.10"},
    }  # fmt: skip
    facts = {"backend": "b", "threads": 1, "rows": [], "verdict": verdict, "failed_rows": {}}
    body = {"recipe": {"name": "m"}, "targets": {"cpu": facts}, "steps": []}
    text = as_markdown(body)
    assert "### Measured on" in text
    line = "- cpu: P, flags avx2, cores 2 of 2, quota none, kernel Linux 6.1, gpu: none seen; numpy 2.1, torch 2.10"
    assert line in text
    older = {key: value for key, value in verdict.items() if key not in ("gpu", "libraries")}
    body["targets"] = {"cpu": {**facts, "verdict": older}}
    assert "gpu: not recorded; libraries not recorded" in as_markdown(body)
