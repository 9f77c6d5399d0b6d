"""Options only."""

from __future__ import annotations

from typing import Literal

from vbpipe.core import Spec


class OnnxRuntime(Spec):
    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    optimization: Literal["basic", "all"] = "all"


PLUGIN = OnnxRuntime
