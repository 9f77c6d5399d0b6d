"""The table of a build, one row per step and variant, as text that any renderer can place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Tone = Literal["plain", "good", "bad", "doubtful", "faint"]

_FIDELITY = ("cosine", "top1_agreement", "cosine_min", "sqnr_db", "max_abs", "max_relative")
"""Closeness to eager. Cosine is always shown, the others where a gate reads them."""

_HIDDEN = frozenset({"size_mb", "process_s", "load_s", "peak_rss_mib", *_FIDELITY})
_TONES: Mapping[str, Tone] = {
    "faster": "good", "pass": "good", "slower": "bad", "fail": "bad", "inconclusive": "doubtful", "mixed": "doubtful",
    "pending": "doubtful",
    "same": "plain", "baseline": "faint",
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One text with how it should look."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Grid:
    """A table. The first column names the row."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def grid(report: Mapping[str, Any], target: str) -> Grid | None:
    """Return the table of a target; None when nothing was judged."""
    facts = report["targets"][target]
    verdict = facts["verdict"]
    if verdict is None:
        return None
    scenarios = verdict["scenarios"]
    metrics = _metric_names(verdict)
    fidelity = [name for name in _FIDELITY if name == "cosine" or name in verdict["gated"]]
    columns = ("step", *scenarios, *fidelity, *metrics, "MB", "verdict", "gates")
    rows = [_row(name, facts, verdict, scenarios, fidelity, metrics, len(columns)) for name in facts["rows"]]
    host = f"{facts['backend']}, {facts['threads']} thread{'s' if facts['threads'] > 1 else ''}"
    title = f"{report['recipe']['name']} on {target} ({host}): speed-up over eager [95 % interval]"
    return Grid(title, columns, tuple(rows))


def conclusions(report: Mapping[str, Any], target: str) -> Iterator[Cell]:
    """Yield the sentences under the table: what each variant came to and why, what is shipped, what to doubt."""
    facts = report["targets"][target]
    verdict = facts["verdict"]
    if verdict is None:
        yield Cell("nothing was judged: a step that the verdict needs has failed.", "bad")
    for row, reason in facts["failed_rows"].items():
        if reason.startswith("failed"):
            yield Cell(f"{row}: {reason}", "bad")
    if verdict is not None:
        yield from _conclusions(verdict)


def _conclusions(verdict: Mapping[str, Any]) -> Iterator[Cell]:
    for variant in verdict["variants"].values():
        yield from _conclusion(variant)
    yield from _slower_steps(verdict)
    shipped = verdict["shipped"]
    if shipped:
        yield Cell(f"packaged: {shipped['row']} (variant {shipped['variant']})", "good")
    elif verdict.get("pending"):
        yield Cell(f"packaged: nothing yet; to measure these engines needs {verdict['pending']}", "doubtful")
        yield Cell("  engines can't be run here: their accuracy is that of the graphs they were built from", "faint")
    elif any(variant["outcome"] == "inconclusive" for variant in verdict["variants"].values()):
        yield Cell("packaged: nothing; what could pass can't be told from what can't, so eager stays", "doubtful")
    else:
        yield Cell("packaged: nothing passes every gate, so eager stays", "bad")
    for problem in verdict["problems"]:
        yield Cell(f"doubt: {problem}", "doubtful")


def _slower_steps(verdict: Mapping[str, Any]) -> Iterator[Cell]:
    """Yield a sentence for each step that made things slower than the step before it, though faster than eager."""
    for name, row in verdict["rows"].items():
        slower = {s: r for s, r in row["over_previous"].items() if r["verdict"] == "slower"}
        if slower and row["previous"] != "eager":
            scenario, ratio = next(iter(slower.items()))
            text = f"{ratio['value']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}] at {scenario}"
            yield Cell(f"{name} is slower than {row['previous']}, the step before it: {text}", "doubtful")


def _conclusion(variant: Mapping[str, Any]) -> Iterator[Cell]:
    name, chosen = variant["variant"], variant["chosen"]
    if variant["outcome"] == "pass":
        yield Cell(f"{name}: passes every gate", "good")
        return
    if variant["outcome"] == "pending":
        yield Cell(f"{name}: pending; what can be judged here passes", "doubtful")
        return
    word, tone = ("refused", "bad") if variant["outcome"] == "fail" else ("can't tell", "doubtful")
    fallback = f"falls back to {chosen}" if chosen else "nothing of it can be shipped"
    yield Cell(f"{name}: {word}; {fallback}", "bad" if tone == "bad" else "doubtful")
    for reason in variant["reasons"]:
        yield Cell(f"  {reason}", "faint")


def _metric_names(verdict: Mapping[str, Any]) -> list[str]:
    found: dict[str, None] = {}
    for row in verdict["rows"].values():
        shown = (
            name for name in row["metrics"] if name not in _HIDDEN and not name.startswith("check_") and "@" not in name
        )
        found.update(dict.fromkeys(shown))
    return list(found)


def _row(
    name: str,
    facts: Mapping[str, Any],
    verdict: Mapping[str, Any],
    scenarios: list[str],
    fidelity: list[str],
    metrics: list[str],
    width: int,
) -> tuple[Cell, ...]:
    row = verdict["rows"].get(name)
    if row is None:
        status = facts["failed_rows"].get(name, "not built").split(":")[0]
        return (Cell(name), *(Cell("") for _ in range(width - 3)), Cell("not built", "bad"), Cell(status, "bad"))
    return (
        Cell(name),
        *(_speedup(row, scenario) for scenario in scenarios),
        *(_number(row["metrics"].get(metric), 4) for metric in fidelity),
        *(_number(row["metrics"].get(metric), 3) for metric in metrics),
        Cell(_size(row)),
        Cell(row["verdict"], _TONES.get(row["verdict"], "plain")),
        _gates(row),
    )


def _speedup(row: Mapping[str, Any], scenario: str) -> Cell:
    if row["verdict"] == "baseline":
        latency = row["latency"].get(scenario)
        return Cell(f"{latency['p50_ms']:.2f} ms" if latency else "", "faint")
    ratio = row["ratios"].get(scenario)
    if ratio is None:
        why = row["not_measured"].split(":")[0] or "not measured"
        return Cell(why, _TONES.get(why, "bad"))
    if ratio["groups"] < 2:
        return Cell(f"{ratio['value']:.2f}x, 1 group", "doubtful")
    return Cell(
        f"{ratio['value']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}]", _TONES.get(ratio["verdict"], "plain")
    )


def _number(figure: Mapping[str, Any] | None, digits: int) -> Cell:
    if figure is None:
        return Cell("")
    text = f"{figure['value']:.{digits}f}"
    if figure.get("low") is not None and figure.get("high") is not None:
        text += f" [{figure['low']:.{digits - 1}f}, {figure['high']:.{digits - 1}f}]"
    return Cell(text)


def _size(row: Mapping[str, Any]) -> str:
    # An eager model has no file of its own: its weights are in the recipe's hands.
    if row["kind"] == "reference":
        return ""
    size_mb = row["size_bytes"] / 1e6
    return f"{size_mb:.1f}" if size_mb >= 1 else f"{size_mb:.3f}"


def _gates(row: Mapping[str, Any]) -> Cell:
    if row["verdict"] == "baseline":
        return Cell("")
    refused = [gate for gate in row["gates"] if gate["outcome"] != "pass"]
    if not refused:
        return Cell("pass", "good")
    names = list(dict.fromkeys(gate["gate"] for gate in refused if gate["outcome"] == row["outcome"]))
    return Cell(f"{row['outcome']}: {', '.join(names)}", _TONES[row["outcome"]])
