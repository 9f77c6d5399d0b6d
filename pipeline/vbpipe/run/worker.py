"""The process that runs one step: `python -m vbpipe.run.worker JOB`."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from vbpipe import plugins
from vbpipe.core import Keeping, Site, Stage
from vbpipe.errors import StepFailed, VbpipeError
from vbpipe.processes import die_with
from vbpipe.run.check import check
from vbpipe.run.job import Job, result_path

PROGRESS_FD = "VBPIPE_PROGRESS_FD"
PARENT = "VBPIPE_PARENT"


def main(arguments: list[str]) -> int:
    """Run the job in the file named by the one argument; 0 when its artifact is complete."""
    if PARENT in os.environ:
        die_with(int(os.environ[PARENT]))
    path = Path(arguments[0])
    job = Job.read(path)
    result: dict[str, Any]
    job.out.mkdir(parents=True, exist_ok=True)
    try:
        result = {"meta": run_job(job, _reporter())}
    except VbpipeError as error:
        traceback.print_exc()
        result = {"error": {"what": error.what, "where": error.where, "hint": error.hint}}
    except MemoryError:
        traceback.print_exc()
        result = {"error": {"what": "it ran out of memory.", "where": "", "hint": "Use fewer or smaller samples."}}
    except Exception as error:  # noqa: BLE001  # the process boundary: whatever a plug-in raises is this step's failure
        traceback.print_exc()
        result = {"error": {"what": _in_short(error), "where": "", "hint": "", "unexpected": True}}
    temporary = result_path(path).with_suffix(".part")
    temporary.write_text(json.dumps(result, default=_plain), encoding="utf-8")
    temporary.replace(result_path(path))
    return 0 if "meta" in result else 3


def run_job(job: Job, progress: Callable[[float | None, str], None]) -> Mapping[str, Any]:
    """Run the step, check its artifact against eager, and return the artifact's meta.

    Raises:
        VbpipeError: the step or the check failed.
    """
    cls = plugins.stage(job.stage)
    assert issubclass(cls, BaseModel)
    stage: Stage = cls.model_validate(dict(job.options))
    site = Site(root=job.root, threads=job.threads, progress=progress)
    meta = dict(stage.run(job.inputs, job.out, site))
    if not any(job.out.iterdir()):
        raise StepFailed(f"stage {job.stage!r} wrote nothing.", hint="Its run() must fill the directory it is given.")
    if job.runner is not None and {"samples", "reference"} <= job.inputs.keys():
        progress(None, "comparing with eager")
        keeps = stage.keeps() if isinstance(stage, Keeping) else None
        meta["check"] = dict(check(job.kind, job.out, job.runner, job.inputs, job.root, keeps))
    return meta


def _reporter() -> Callable[[float | None, str], None]:
    number = os.environ.get(PROGRESS_FD)
    if number is None:
        return lambda _fraction, message: print(message, file=sys.stderr)  # noqa: T201  # run by hand, from a job file
    pipe = os.fdopen(int(number), "w", buffering=1, encoding="utf-8")
    last = 0.0

    def report(fraction: float | None, message: str) -> None:
        nonlocal last
        now = time.monotonic()
        # A stage may call this in a tight loop; nobody reads more than a few lines a second.
        if now - last < 0.1 and fraction is not None and fraction < 1:
            return
        last = now
        with suppress(BrokenPipeError):
            print(json.dumps([fraction, message]), file=pipe)  # the pipe to the build, not a terminal

    return report


def _in_short(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}{place}"


def _plain(value: object) -> object:
    """Return numpy scalars and other small values as JSON can hold them."""
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
