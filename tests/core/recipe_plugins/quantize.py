"""Options only."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import model_validator

from vbpipe.core import Spec


class Scheme(Spec):
    weight: Literal["int8", "int4"] = "int8"
    activation: Literal["int8"] | None = None
    scheme: str = "symmetric"
    granularity: str = "per_channel"
    calibration: str = "entropy"
    group_size: int | None = None

    @model_validator(mode="after")
    def _fits(self) -> Scheme:
        if self.weight == "int4" and self.group_size is None:
            raise ValueError("int4 weights need a group_size")
        return self


class Rule(Spec):
    match: str | None = None
    type: str | None = None
    keep: bool = False


class Quantize(Spec):
    in_recipe: ClassVar[bool] = True
    scope: ClassVar[str] = "chain"
    default: Scheme = Scheme()
    rules: tuple[Rule, ...] = ()


PLUGIN = Quantize
