"""Options only."""

from __future__ import annotations

from typing import ClassVar, Literal

from vbpipe.core import Spec


class Fuse(Spec):
    in_recipe: ClassVar[bool] = True
    scope: ClassVar[str] = "chain"
    level: Literal["none", "all"] = "all"


PLUGIN = Fuse
