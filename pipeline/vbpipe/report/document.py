"""The report of a build as JSON: the source of every other form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vbpipe import __version__
from vbpipe.core import Artifact
from vbpipe.errors import UsageError
from vbpipe.measure import ceilings
from vbpipe.plan import Plan
from vbpipe.recipe.model import Target
from vbpipe.run.executor import StepResult
from vbpipe.runner import Runner

FORMAT = 1

Report = Mapping[str, Any]


def make_report(
    plan: Plan, results: Mapping[str, StepResult], *, recipe_digest: str, allow_pending: bool = False
) -> dict[str, Any]:
    """Return the report of a build: JSON values only, every target's verdict included.

    Args:
        plan: what was asked for.
        results: step id to how it ended; steps missing from it were not reached.
        recipe_digest: sha256 (hex) of the recipe's text.
        allow_pending: whether what only another host can measure leaves the exit code 0.
    """
    report = {
        "report": FORMAT,
        "vbpipe": __version__,
        "recipe": {"name": plan.recipe, "digest": recipe_digest},
        "targets": {target: _target(plan, target, results) for target in plan.targets},
        "steps": [_step(results[i]) for i in plan.steps if i in results],
    }
    return {**report, "exit_code": exit_code(report, allow_pending=allow_pending)}


def exit_code(report: Report, *, allow_pending: bool = False) -> int:
    """Return the build's exit code.

    3: a step failed. 1: a gate failed. 4: a gate could not tell. 5: another host must measure, unless that is allowed.
    Else 0.
    """
    if any(step["status"] == "failed" for step in report["steps"]):
        return 3
    outcomes = [
        variant["outcome"]
        for target in report["targets"].values()
        if target["verdict"] is not None
        for variant in target["verdict"]["variants"].values()
    ]
    if any(target["verdict"] is None for target in report["targets"].values()):
        return 3
    if "fail" in outcomes or "inconclusive" in outcomes:
        return 1 if "fail" in outcomes else 4
    return 5 if "pending" in outcomes and not allow_pending else 0


def read_report(path: Path) -> dict[str, Any]:
    """Read a report; raises UsageError for a file that is none, or one of another version."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"it can't be read: {error.strerror}.", where=str(path)) from error
    except ValueError as error:
        raise UsageError("it is no report.", where=str(path), hint="`vbpipe build` writes report.json.") from error
    if not isinstance(body, dict) or body.get("report") != FORMAT:
        raise UsageError(f"it is no report of version {FORMAT}.", where=str(path))
    return body


def _target(plan: Plan, target: str, results: Mapping[str, StepResult]) -> dict[str, Any]:
    finals = {name: results[i].artifact for name, i in plan.finals[target].items() if i in results}
    verdict, bundle = finals.get("gate"), finals.get("package")
    return {
        "backend": plan.targets[target].backend,
        "threads": plan.targets[target].threads,
        **_ceilings(plan.targets[target]),
        "rows": list(plan.rows[target]),
        "verdict": _verdict(verdict) if verdict else None,
        "bundle": {"digest": bundle.digest, **bundle.meta} if bundle else None,
        "failed_rows": _failed_rows(plan, target, results),
    }


def _ceilings(target: Target) -> dict[str, Any]:
    """Return what this host can do at most, as the cache has it now, or null and the sentence that says why."""
    found, missing = ceilings.find(Runner(backend=target.backend, options=target.options, threads=target.threads))
    return {"ceilings": asdict(found) if found else None, "ceilings_missing": missing}


def _verdict(artifact: Artifact) -> Any:
    return json.loads((artifact.path / "verdict.json").read_text(encoding="utf-8"))


def _failed_rows(plan: Plan, target: str, results: Mapping[str, StepResult]) -> dict[str, str]:
    found = {}
    for row, step_id in plan.rows[target].items():
        result = results.get(step_id)
        if result is not None and result.artifact is None:
            found[row] = f"{result.status}: {result.error.what if result.error else ''}"
    return found


def _step(result: StepResult) -> dict[str, Any]:
    step = result.step
    return {
        "label": step.label,
        "identities": list(step.identities),
        "status": result.status,
        "seconds": round(result.seconds, 3),
        "key": result.key.digest if result.key else None,
        "kind": step.stage.produces(),
        "digest": result.artifact.digest if result.artifact else None,
        "meta": dict(result.artifact.meta) if result.artifact else {},
        "error": str(result.error) if result.error else None,
        "failure": str(result.failure) if result.failure else None,
    }
