"""Measure how fast candidates are against each other, with intervals that hold on a noisy machine."""

from __future__ import annotations

from vbpipe.measure.facts import HostFacts, host_facts, host_identity
from vbpipe.measure.protocol import measure
from vbpipe.measure.record import (
    CONTROL_SUFFIX,
    Candidate,
    Concern,
    Group,
    Measurement,
    Outcome,
    Scenario,
    ScenarioRun,
    Settings,
    WorkerRun,
)
from vbpipe.measure.statistics import (
    ColdStart,
    Latency,
    Ratio,
    Verdict,
    cold_start,
    latency,
    noise_floor,
    ratio,
    verdict,
)

__all__ = [
    "CONTROL_SUFFIX",
    "Candidate",
    "ColdStart",
    "Concern",
    "Group",
    "HostFacts",
    "Latency",
    "Measurement",
    "Outcome",
    "Ratio",
    "Scenario",
    "ScenarioRun",
    "Settings",
    "Verdict",
    "WorkerRun",
    "cold_start",
    "host_facts",
    "host_identity",
    "latency",
    "measure",
    "noise_floor",
    "ratio",
    "verdict",
]
