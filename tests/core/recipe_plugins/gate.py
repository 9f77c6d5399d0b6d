"""Options only."""

from __future__ import annotations

from typing import ClassVar

from vbpipe.core import Spec


class Gate(Spec):
    scope: ClassVar[str] = "target"


PLUGIN = Gate
