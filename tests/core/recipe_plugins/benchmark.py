"""Options only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from vbpipe.core import Spec


class Benchmark(Spec):
    in_recipe: ClassVar[bool] = True
    scope: ClassVar[str] = "target"
    scenarios: tuple[Mapping[str, int], ...] = ()
    budget_s: Annotated[float, Field(gt=0)] = 60.0


PLUGIN = Benchmark
