"""The recipe as typed, immutable values (version 1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from vbpipe.core import Spec

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)]
Reference = Annotated[str, Field(pattern=r"^[^:\s]+:[A-Za-z_][A-Za-z0-9_]*$")]
"""`models/minilm.py:build` (a file in the recipe's folder) or `package.module:function`."""

DType = Literal["float32", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"]
Size = Annotated[int, Field(ge=1)]


class Range(Spec):
    """Uniform values in low..high; high is excluded for integers."""

    low: float
    high: float

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        if not self.low < self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")
        return self


class TensorInput(Spec):
    """One tensor that forward() reads."""

    dtype: DType
    shape: tuple[Size | Name, ...]
    """Sizes, or symbols of `model.shapes`."""
    values: Literal["normal", "ones", "zeros"] | Range = "normal"
    """How made-up samples are filled; real ones come from `data`."""


class Dimension(Spec):
    """The optimization profile of one symbol: sizes that the engine must take, and the one it is tuned for."""

    min: Size
    opt: Size
    max: Size

    @model_validator(mode="after")
    def _ordered(self) -> Dimension:
        if not self.min <= self.opt <= self.max:
            raise ValueError(f"min <= opt <= max does not hold for {self.min}, {self.opt}, {self.max}")
        return self


class Model(Spec):
    """The PyTorch module: who builds it, what it reads, what it returns."""

    factory: Reference
    args: Mapping[str, Any] = {}
    """Keyword arguments of the factory."""
    inputs: Annotated[Mapping[str, TensorInput], Field(min_length=1)]
    """In forward()'s order. Dots nest: `state.h` and `state.c` reach forward() as `state={"h": …, "c": …}`;
    digits make lists: `past.0`, `past.1`."""
    outputs: Annotated[tuple[Name, ...], Field(min_length=1)]
    """Names for what forward() returns, in its order."""
    shapes: Mapping[Name, Dimension] = {}
    files: tuple[str, ...] = ()
    """Files beside the recipe that the factory or the data functions read; their bytes are part of the cache key."""
    packages: tuple[str, ...] = ()
    """Distributions whose version is part of the cache key, beyond those that the factory's file imports."""


class Data(Spec):
    """Where real samples come from."""

    calibration: Reference | None = None
    """() -> iterable of {input: array}."""
    samples: Annotated[int, Field(ge=1, le=100_000)] = 64
    """At most this many calibration samples are read."""
    evaluation: Reference | None = None
    """(run: {input: array} -> {output: array}) -> {metric: float or {value, low, high}}."""


class Target(Spec):
    """One place where the engine will run. Keys beyond these are options of the backend."""

    backend: str
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    arch: str | None = None
    options: Mapping[str, Any] = {}


class StoredReport(Spec):
    """A report of an earlier build, to compare with what it says of the same target."""

    report: str
    """A report.json in the recipe's folder; its bytes are part of the gate's cache key."""
    row: str | None = None
    """The step in it; the one of the same name when absent."""


_BETTER_LOWER = frozenset(
    {"p50_ms", "p90_ms", "p99_ms", "first_ms", "switch_ms", "process_s", "load_s", "peak_rss_mib", "size_mb"}
    | {"max_abs", "max_relative"}
)


class Gate(Spec):
    """A rule on one measured figure. What can't be told never passes."""

    metric: Name
    """`speedup`; a fidelity figure (`cosine`, `cosine_min`, `sqnr_db`, `max_abs`, `max_relative`, `top1_agreement`);
    `p50_ms`, `p90_ms`, `p99_ms`, `throughput` (rows a second), `first_ms`, `switch_ms` in each scenario; `process_s`,
    `load_s`, `peak_rss_mib`, `size_mb`; or a metric of `data.evaluation`."""
    over: str | StoredReport = "eager"
    """What it is compared with: `eager`, `previous` (the step before), the name of a variant, or a stored report. For
    a stored report, `speedup` is this step's speed-up over eager divided by the one there."""
    min: float | None = None
    max: float | None = None
    max_drop: float | None = None
    """For figures that are better high, such as an evaluation metric: the most it may fall below `over`'s."""
    scenario: str | None = None
    """For figures that each scenario has: only this one ("batch=1,seq=128"); every one when absent."""

    @model_validator(mode="after")
    def _bounded(self) -> Gate:
        if self.min is None and self.max is None and self.max_drop is None:
            raise ValueError("a gate needs one of min, max, max_drop")
        if self.max_drop is None:
            return self
        if self.metric == "speedup":
            raise ValueError("max_drop is no bound on speedup: write `min: 0.97` for at most 3 % lost")
        if self.metric in _BETTER_LOWER:
            raise ValueError(f"max_drop says how far a figure may fall, and {self.metric} is better low: use max")
        if self.metric == "throughput" and isinstance(self.over, StoredReport):
            raise ValueError("throughput of another run says as much of the machine as of the step: use speedup")
        return self


class Recipe(Spec):
    """A recipe with one variant's changes applied; what every stage is configured from."""

    recipe: Literal[1]
    name: Name
    model: Model
    data: Data = Data()
    variants: Annotated[Mapping[Name, Mapping[str, Any]], Field(min_length=1)] = {"standard": {}}
    """Each changes `model`, `data` or `stages`: `stages.quantize.default: {…}` replaces what is at that path, a key
    without dots merges, null removes. The first is the reference."""
    targets: Annotated[Mapping[Name, Target], Field(min_length=1)]
    stages: Mapping[str, Mapping[str, Any]] = {}
    """Stage name to its options; the options' types come from the stage plug-ins."""
    gates: tuple[Gate, ...] = ()
    ship: Mapping[str, Mapping[str, Any]] = {}
