"""What each module was asked to compute in, kept beside a graph as `precision.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

FILE = "precision.json"


def write_precisions(asked: Mapping[str, str], directory: Path) -> None:
    """Write module path to form ("static int8 in fp16", "float"), sorted so that equal graphs give equal bytes."""
    text = json.dumps(dict(asked), indent=1, sort_keys=True, ensure_ascii=False)
    (directory / FILE).write_text(text + "\n", encoding="utf-8")


def read_precisions(directory: Path) -> dict[str, str]:
    """Read what `write_precisions` wrote; empty where there is none."""
    path = directory / FILE
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
