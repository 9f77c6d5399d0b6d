"""`vbpipe worker run`: one job again, in the foreground."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from vbpipe.cli.terminal import stdout
from vbpipe.processes import environment, python_command
from vbpipe.run.job import Job, result_path


def run_again(path: Path) -> int:
    """Run the job into a fresh temporary folder, print where, and return the process's exit code.

    Raises:
        UsageError: the file is no job.
    """
    job = Job.read(path)
    folder = Path(tempfile.mkdtemp(prefix="vbpipe-job-"))
    copy = folder / "job.json"
    copy.write_text(json.dumps({**job.to_json(), "out": str(folder / "out")}), encoding="utf-8")
    command = python_command("vbpipe.run.worker", str(copy))
    code = subprocess.run(command, env=environment(job.threads), check=False).returncode
    console = stdout()
    if code == 0:
        console.print(f"{job.label}: done, its files are in {folder / 'out'}", markup=False)
        return 0
    result = result_path(copy)
    what = json.loads(result.read_text())["error"]["what"] if result.exists() else f"its process ended with {code}"
    console.print(f"{job.label}: failed again: {what}", markup=False)
    return 3
