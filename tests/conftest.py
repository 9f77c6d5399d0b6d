"""What all tests share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vbpipe import plugins

PLUGIN_FOLDER = Path(__file__).parent / "plugin"


@pytest.fixture
def fake_plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install tests/plugin for this process and the processes that it starts."""
    monkeypatch.syspath_prepend(str(PLUGIN_FOLDER))
    path = os.pathsep.join(filter(None, [str(PLUGIN_FOLDER), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYTHONPATH", path)
    plugins.names.cache_clear()
    yield
    plugins.names.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "vbpipe_fake"]:
        del sys.modules[name]
