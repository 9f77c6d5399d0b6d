"""One step as a file: everything a worker process needs, so that the same file reproduces a failure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from vbpipe.core import Artifact
from vbpipe.errors import UsageError
from vbpipe.plan import Step
from vbpipe.runner import Runner

VERSION = 1


@dataclass(frozen=True)
class Job:
    """A step, its inputs by path and digest, and where its output goes."""

    stage: str
    label: str
    options: Mapping[str, Any]
    inputs: Mapping[str, Artifact]
    out: Path
    root: Path
    threads: int
    kind: str
    runner: Runner | None

    @classmethod
    def of(cls, step: Step, inputs: Mapping[str, Artifact], out: Path, root: Path, threads: int) -> Job:
        """Return the job of a step whose inputs are there."""
        assert isinstance(step.stage, BaseModel)
        return cls(
            stage=step.stage.name,
            label=step.label,
            options=step.stage.model_dump(mode="json"),
            inputs=inputs,
            out=out,
            root=root,
            threads=threads,
            kind=step.stage.produces(),
            runner=step.runner,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the job as JSON values."""
        return {
            "job": VERSION,
            "stage": self.stage,
            "label": self.label,
            "options": dict(self.options),
            "inputs": {name: {**asdict(a), "path": str(a.path)} for name, a in self.inputs.items()},
            "out": str(self.out),
            "root": str(self.root),
            "threads": self.threads,
            "kind": self.kind,
            "runner": self.runner.model_dump(mode="json") if self.runner else None,
        }

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read a job; raises UsageError when the file is none."""
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
            if body.get("job") != VERSION:
                raise UsageError(f"it is no job of version {VERSION}.", where=str(path))
            return cls(
                stage=body["stage"],
                label=body["label"],
                options=body["options"],
                inputs={
                    name: Artifact(a["kind"], a["digest"], Path(a["path"]), a["meta"])
                    for name, a in body["inputs"].items()
                },
                out=Path(body["out"]),
                root=Path(body["root"]),
                threads=body["threads"],
                kind=body["kind"],
                runner=Runner.model_validate(body["runner"]) if body["runner"] else None,
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"it can't be read as a job ({error}).", where=str(path)) from error


def result_path(job_path: Path) -> Path:
    """Return where the worker leaves what the step said of its artifact, or why it failed."""
    return job_path.with_suffix(".result.json")
