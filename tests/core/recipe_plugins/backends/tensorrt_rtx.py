"""Options only."""

from __future__ import annotations

from vbpipe.core import Spec


class TensorRTRTX(Spec):
    workspace_mib: int = 1024


PLUGIN = TensorRTRTX
