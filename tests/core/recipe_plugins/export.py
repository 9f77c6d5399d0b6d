"""Options only."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from vbpipe.core import Spec


class Export(Spec):
    """Writes graphs."""

    in_recipe: ClassVar[bool] = True
    scope: ClassVar[str] = "chain"
    formats: tuple[Literal["torchscript", "onnx"], ...] = ("onnx",)
    opset: Annotated[int, Field(ge=13, le=23)] = 20
    """The ONNX operator set."""
    check: bool = True
    inner: SkipJsonSchema[str | None] = None


PLUGIN = Export
