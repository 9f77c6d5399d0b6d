"""The report as JUnit XML: every gate of every variant's last row, and every failed step, is a test case."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree as ET  # written here, never parsed


def as_junit(report: Mapping[str, Any]) -> str:
    """Return the report as JUnit XML. What can't be told is a failure: a gate never passes on doubt."""
    root = ET.Element("testsuites", name=f"vbpipe {report['recipe']['name']}")
    for target, facts in report["targets"].items():
        suite = ET.SubElement(root, "testsuite", name=target)
        for variant in (facts["verdict"] or {"variants": {}})["variants"].values():
            row = facts["verdict"]["rows"].get(variant["last"])
            for gate in row["gates"] if row else ():
                _case(suite, f"{variant['variant']}: {gate['gate']}", variant["last"], gate)
            if row is None:
                built = {"outcome": "fail", "reason": variant["reasons"][0]}
                _case(suite, f"{variant['variant']}: built", variant["last"], built)
        _count(suite)
    steps = ET.SubElement(root, "testsuite", name="steps")
    for step in report["steps"]:
        outcome = "pass" if step["status"] in ("hit", "built") else "fail"
        _case(steps, step["identities"][0], step["label"], {"outcome": outcome, "reason": step["error"] or ""})
    _count(steps)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ET.Element, name: str, place: str, gate: Mapping[str, Any]) -> None:
    case = ET.SubElement(suite, "testcase", name=_printable(name), classname=_printable(place))
    if gate["outcome"] != "pass":
        ET.SubElement(case, "failure", type=gate["outcome"], message=_printable(gate["reason"]))


def _count(suite: ET.Element) -> None:
    suite.set("tests", str(len(suite.findall("testcase"))))
    suite.set("failures", str(len(suite.findall("testcase/failure"))))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)
