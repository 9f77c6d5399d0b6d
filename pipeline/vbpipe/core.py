"""The values that every part of vbpipe passes around, and the protocols that plug-ins meet."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    import numpy as np

    from vbpipe.recipe import Recipe, Target
    from vbpipe.recipe.model import Model

Meta = Mapping[str, Any]
"""Small JSON facts about an artifact: shapes, counts, versions, notes."""

Run = Callable[[Mapping[str, "np.ndarray[Any, Any]"]], "dict[str, np.ndarray[Any, Any]]"]
"""One inference: named input arrays to named output arrays, in the order of the recipe's `outputs`."""

Inputs = Mapping[str, "Artifact"]
"""What a step reads. Keys are artifact kinds for a chain step (the newest of each kind), see `Stage.scope`."""


class Spec(BaseModel):
    """Base of everything read from a recipe: immutable, and strict about keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


Dialect = Literal["onnxruntime", "standard", "tensorrt"]
"""Which operators and types a graph may have. onnxruntime: ONNX's own and `com.microsoft`. standard: ONNX's own only.
tensorrt: ONNX's own, symmetric Q/DQ on inputs, float types in the graph, as TensorRT's parser takes them."""


@dataclass(frozen=True)
class Artifact:
    """An immutable directory in the store. `digest` (sha256, hex) names its bytes, not its history.

    Kinds that exist: "samples", "reference", "torchscript", "onnx", "engine", "evaluation", "measurement", "verdict",
    "bundle". A plug-in may add its own.
    """

    kind: str
    digest: str
    path: Path
    meta: Meta


@dataclass(frozen=True)
class Site:
    """Where a step runs: facts that must never change what it produces, so they are in no cache key."""

    root: Path
    """The recipe's folder: `factory` and `data` references resolve here."""
    threads: int = 1
    progress: Callable[[float | None, str], None] = lambda _fraction, _message: None
    """Call with a fraction in 0..1 (None: unknown) and a short message; cheap enough for a loop."""


class Stage(Protocol):
    """One step. The instance is its own configuration and holds no other state.

    Write one file in a plug-in package: the class, then `PLUGIN: type[Stage] = TheClass`.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    """Raise it when equal inputs would now give a different artifact."""
    scope: ClassVar[Literal["chain", "each", "target"]]
    """"chain": one step of a variant's chain; inputs are the newest artifact of each consumed kind.
    "each": runs beside every runnable artifact of a chain, which it gets as `inputs["subject"]`.
    "target": once per target over all its variants; inputs are everything consumed, keyed "variant/label"."""
    after: ClassVar[tuple[str, ...]]
    """Names of the stages that come before this one in a chain, where present."""

    @classmethod
    def configure(cls, recipe: Recipe, target: Target) -> tuple[Stage, ...]:
        """Return the steps that this recipe (of one variant) asks for; none when it asks for none."""

    def label(self) -> str:
        """Return the step's name in reports: "export.onnx"."""

    def consumes(self) -> frozenset[str]:
        """Return the artifact kinds that it reads."""

    def produces(self) -> str:
        """Return the kind of its artifact."""

    def fingerprint(self, root: Path) -> Mapping[str, str]:
        """Return what alters its output beyond options and inputs: tool versions, source digests, hardware facts."""

    def run(self, inputs: Inputs, out: Path, site: Site) -> Meta:
        """Write the artifact's files into the empty directory `out`; raise VbpipeError with what to do."""


@runtime_checkable
class Keeping(Protocol):
    """A stage that promises to change nothing but speed; the promise is checked on real samples after each run."""

    def keeps(self) -> str:
        """Return the kind of the input whose outputs it keeps."""


@dataclass(frozen=True)
class LayerChoice:
    """What a step would do to one module of the recipe's model.

    Args:
        module: its path in `named_modules()`.
        kind: its class.
        rule: which rule decides, as people write it; "default" where none does.
        gets: its form after the step: "dynamic int8", "float".
        note: what keeps it from that, or what else one should know; empty otherwise.
    """

    module: str
    kind: str
    rule: str
    gets: str
    note: str = ""


@runtime_checkable
class Layered(Protocol):
    """A stage that treats modules apart, and can say beforehand what it would do to each."""

    def layers(self, model: Model, root: Path) -> tuple[LayerChoice, ...]:
        """Return what becomes of every module with weights, in the model's order; builds the model, runs nothing.

        Raises:
            VbpipeError: the model can't be built, or a rule meets none of its modules.
        """


class Backend(Protocol):
    """How one engine runtime compiles, and how it runs what it compiled. The instance holds its own options.

    Write one file in a plug-in package's `backends` folder: the class, then `PLUGIN: type[Backend] = TheClass`.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    """The artifact kind that `build` reads: "onnx", "torchscript" or "reference"."""
    runs: ClassVar[frozenset[str]]
    """The artifact kinds that `open` accepts; always holds "engine"."""
    dialect: ClassVar[Dialect]
    """Which ONNX graphs `build` takes, for backends that build from ONNX."""

    def unavailable(self) -> str | None:
        """Return why it can't be used here and the command that would change that, or None. Never raises."""

    def fingerprint(self) -> Mapping[str, str]:
        """Return the tool versions and hardware facts that alter what `build` writes."""

    def build(self, source: Artifact, out: Path, threads: int) -> Meta:
        """Compile `source` into the empty directory `out`."""

    def open(self, kind: str, path: Path, threads: int, root: Path | None = None) -> AbstractContextManager[Run]:
        """Load the artifact directory `path` of `kind`.

        `root` is the recipe's folder, needed only for "reference" artifacts, whose model is the recipe's own code.
        The Run raises EngineError for a missing, unknown, wrongly shaped or wrongly typed input.
        """


@dataclass(frozen=True)
class TracedNode:
    """A node of a graph, or a layer of an engine: what it computes of the recipe's model.

    Args:
        output: the first tensor that it makes, or the layer's name.
        operator: its kind; those of other domains than ONNX's as "domain:Name".
        modules: paths of `named_modules()`, several for a fused node; empty where it is not known.
    """

    output: str
    operator: str
    modules: tuple[str, ...]


@runtime_checkable
class Traceable(Protocol):
    """A backend that knows which modules the nodes of its artifacts compute."""

    def nodes(self, path: Path) -> tuple[TracedNode, ...]:
        """Return the nodes of the artifact directory `path`, in their order; reads no weights."""


@runtime_checkable
class Inspectable(Protocol):
    """A backend that can look into an engine and tell in which types its layers compute."""

    def precisions(self, path: Path) -> Mapping[str, tuple[str, ...]]:
        """Return module to what its operators with weights compute in, in the engine directory `path`.

        "int8", "int4", "fp8", "fp16", "bf16" and "float" are types that the engine computes in, weights included; a
        weight that is kept in another type and turned to float for the operator is "int8 weights in float". Modules
        whose operators can't be told are left out.
        """


@runtime_checkable
class Placed(Protocol):
    """A backend whose engines may be for a device that this host lacks. Its field `arch` comes from the target."""

    def pending(self) -> str | None:
        """Return what its engines need and this host lacks ("an SM86 GPU"), None where they run here. Never raises."""


@runtime_checkable
class Measurable(Protocol):
    """A backend that can measure how fast its kernels are at best on this host, so that reports can show shares of it.

    Reports do so for targets that leave the backend's options alone: other options may mean another processor.
    """

    def ceilings(self, threads: int) -> Mapping[str, float]:
        """Return kind of arithmetic to its highest rate; a multiply-add is two operations.

        "fp32" in GFLOP/s; names that start with "int8" ("int8_u8s8": unsigned activations times signed weights) in
        Gop/s. Called in a fresh process, on a host where `unavailable` is None; may take some seconds.

        Raises:
            EngineError: they can't be measured here.
        """


@dataclass(frozen=True)
class CacheKey:
    """Named parts, stored beside the result so that a miss can be explained. Values are short strings."""

    parts: Mapping[str, str]

    @property
    def digest(self) -> str:
        """Return the sha256 (hex) of the parts in canonical JSON."""
        text = json.dumps(dict(self.parts), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()


def cache_key(stage: Stage, inputs: Mapping[str, str], root: Path) -> CacheKey:
    """Return the key of a step.

    Args:
        stage: the configured step.
        inputs: input name to artifact digest. Digests, not keys: an upstream step that was run again and gave the
            same bytes leaves everything after it a hit.
        root: the recipe's folder.
    """
    own = {"stage": stage.name, "version": str(stage.version)}
    options = {f"options.{path}": value for path, value in canonical(stage)}
    tools = {f"env.{name}": value for name, value in stage.fingerprint(root).items()}
    read = {f"input.{name}": digest for name, digest in inputs.items()}
    return CacheKey({**own, **options, **tools, **read})


def canonical(value: object) -> tuple[tuple[str, str], ...]:
    """Return (path, JSON text) of every leaf of a Spec, such that different values never give equal leaves.

    A field that is None is left out: unset is the same as absent, so a new optional field changes no key. In mappings,
    which belong to users, None counts, and so does an order that is not alphabetical: forward() binds by position.
    """
    return tuple(_leaves("", value))


def _leaves(path: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, BaseModel):
        for name in sorted(type(value).model_fields):
            field = getattr(value, name)
            if field is not None:
                yield from _leaves(f"{path}.{name}" if path else name, field)
    elif isinstance(value, Mapping) and value:
        names = [str(name) for name in value]
        if names != sorted(names):
            yield f"{path}.#order", json.dumps(names)
        for name, item in value.items():
            plain = str(name).replace("_", "").replace("-", "").isalnum()
            yield from _leaves(f"{path}.{name}" if plain else f"{path}[{json.dumps(str(name))}]", item)
    elif isinstance(value, list | tuple) and value:
        for index, item in enumerate(value):
            yield from _leaves(f"{path}[{index}]", item)
    else:
        yield path, json.dumps(value, sort_keys=True, default=list)
