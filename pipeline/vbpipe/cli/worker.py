"""`vbpipe worker run`: one job again, in the foreground."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from vbpipe.cli.terminal import stdout
from vbpipe.run.job import Job, result_path
from vbpipe.run.process import START, THREAD_VARIABLES


def run_again(path: Path) -> int:
    """Run the job into a fresh temporary folder, print where, and return the process's exit code.

    Raises:
        UsageError: the file is no job.
    """
    job = Job.read(path)
    folder = Path(tempfile.mkdtemp(prefix="vbpipe-job-"))
    copy = folder / "job.json"
    copy.write_text(json.dumps({**job.to_json(), "out": str(folder / "out")}), encoding="utf-8")
    threads = {name: str(job.threads) for name in THREAD_VARIABLES}
    command = [sys.executable, "-c", START, str(copy)]
    code = subprocess.run(command, env={**os.environ, **threads}, check=False).returncode
    console = stdout()
    if code == 0:
        console.print(f"{job.label}: done, its files are in {folder / 'out'}", markup=False)
        return 0
    result = result_path(copy)
    what = json.loads(result.read_text())["error"]["what"] if result.exists() else f"its process ended with {code}"
    console.print(f"{job.label}: failed again: {what}", markup=False)
    return 3
