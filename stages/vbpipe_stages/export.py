"""Turn the recipe's model into TorchScript and ONNX, each checked against eager before it is accepted."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from vbpipe import samples
from vbpipe.core import Inputs, Meta, Site, Spec, Stage
from vbpipe.errors import VbpipeError
from vbpipe.recipe.model import Model, Recipe, Target
from vbpipe.runner import Runner, open_runner
from vbpipe_stages import _to_onnx, _torch_model, _torchscript_file
from vbpipe_stages._agreement import disagreement
from vbpipe_stages._interface import Interface
from vbpipe_stages._reference import Reference, read_sizes
from vbpipe_stages._user_code import blame, dependencies, installed

if TYPE_CHECKING:
    import torch

Format = Literal["torchscript", "onnx"]
Attempt = tuple[str, Callable[[Path], Meta]]
"""A way to export: its name, and a function that writes the artifact into a directory."""


class Export(Spec):
    """Write `model.pt`, or `model.onnx` with `provenance.json`; and `io.json`."""

    name: ClassVar[str] = "export"
    version: ClassVar[int] = 2
    scope: ClassVar[Literal["chain", "each", "target"]] = "chain"
    after: ClassVar[tuple[str, ...]] = ("eager",)
    in_recipe: ClassVar[bool] = True

    formats: Annotated[tuple[Format, ...], Field(min_length=1)] = ("torchscript", "onnx")
    opset: Annotated[int, Field(ge=13, le=23)] = 20
    exporter: Literal["auto", "dynamo", "torchscript"] = "auto"
    """For ONNX. auto: torch.export, and tracing where that fails or gives a wrong graph."""
    script: Literal["auto", "trace", "script"] = "auto"
    """For TorchScript. auto: trace, and compile the source where the trace is wrong at another size."""
    model: SkipJsonSchema[Model | None] = None
    """Set by `configure`."""

    @classmethod
    def configure(cls, recipe: Recipe, target: Target) -> tuple[Stage, ...]:
        """Return one step per format."""
        del target
        asked = cls.model_validate(dict(recipe.stages.get(cls.name, {})))
        return tuple(asked.model_copy(update=_one(asked, each, recipe.model)) for each in dict.fromkeys(asked.formats))

    def label(self) -> str:
        """Return "export.onnx" or "export.torchscript"."""
        return f"{self.name}.{self.formats[0]}"

    def consumes(self) -> frozenset[str]:
        """Return what the export is checked against."""
        return frozenset({"reference", "samples"})

    def produces(self) -> str:
        """Return "torchscript" or "onnx"."""
        return self.formats[0]

    def fingerprint(self, root: Path) -> Mapping[str, str]:
        """Return the exporters' versions and the digests of the factory's source."""
        model = self._model()
        tools = ("torch",) if self.produces() == "torchscript" else ("torch", "onnx", "onnx-ir", "onnxscript")
        found = {name: installed(name) for name in tools}
        return {**dependencies(model.factory, model, root), **found}

    def run(self, inputs: Inputs, out: Path, site: Site) -> Meta:
        """Try each way to export in turn, until one gives a program that agrees with eager on every check sample.

        Raises:
            VbpipeError: none does; names what was wrong with each.
        """
        reference = Reference.read(inputs["reference"].path)
        loaded = _torch_model.load(self._model(), site.root, clone_inputs=bool(reference.changes_inputs))
        _same_weights(loaded, reference)
        check = _Check.read(inputs)
        interface = Interface.of(self._model())
        failed: list[str] = []
        for name, attempt in self._attempts(loaded, reference):
            site.progress(None, f"{self.label()}: {name}")
            try:
                with blame(name, site.root), _torch_model.torch_threads(1):
                    facts = attempt(out)
                    interface.write(out)
            except VbpipeError as error:
                wrong: str | None = error.what
            else:
                wrong = check.wrong(self.produces(), out)
            if wrong is None:
                return {**facts, "exporter": name, "fallback_reason": "; ".join(failed) or None}
            failed.append(wrong if wrong.startswith(name) else f"{name}: {wrong}")
            _empty(out)
        raise VbpipeError(
            f"no exporter gave a program that agrees with eager. {' | '.join(failed)}",
            where=self.label(),
            hint=_advice(reference),
        )

    def _model(self) -> Model:
        assert self.model is not None, "configure() sets the model"
        return self.model

    def _attempts(self, loaded: _torch_model.Loaded, reference: Reference) -> Iterator[Attempt]:
        """Yield the ways that the options allow, the preferred one first."""
        model = self._model()
        tensors = _example(model)
        if self.produces() == "torchscript":
            if self.script != "script":
                yield "trace", lambda out: _save(_trace(loaded.adapter, tensors), out)
            if self.script != "trace":
                yield "script", lambda out: _save(_trace(_scripted(loaded, reference), tensors), out)
            return

        def onnx(export: Callable[..., _to_onnx.Graph], adapter: torch.nn.Module, out: Path) -> Meta:
            with _no_grad():
                graph = export(adapter, model, tensors, self.opset, reference.modules)
            _to_onnx.write(graph, out)
            named = sum(1 for path in graph.provenance.nodes.values() if path)
            return {"opset": graph.opset, "nodes": len(graph.provenance.nodes), "nodes_with_module": named}

        if self.exporter != "torchscript":
            yield "dynamo", lambda out: onnx(_to_onnx.export_dynamo, loaded.adapter, out)
        if self.exporter != "dynamo" and self.script != "script":
            yield "trace", lambda out: onnx(_to_onnx.export_torchscript, loaded.adapter, out)
        if self.exporter != "dynamo" and self.script != "trace":
            yield (
                "script",
                lambda out: onnx(_to_onnx.export_torchscript, _trace(_scripted(loaded, reference), tensors), out),
            )


@dataclass(frozen=True)
class _Check:
    """The samples on which an export must agree with eager."""

    rows: Sequence[Mapping[str, Any]]
    expected: Sequence[Mapping[str, Any]]
    sizes: Sequence[Mapping[str, int]]

    @classmethod
    def read(cls, inputs: Inputs) -> _Check:
        folder, reference = inputs["samples"].path, inputs["reference"].path
        rows = samples.load(folder / "check.safetensors")
        return cls(rows, Reference.read(reference).expected(reference), read_sizes(folder))

    def wrong(self, kind: str, out: Path) -> str | None:
        """Return what is wrong with the artifact in `out`, run by the backend of its kind."""
        backend = {"torchscript": "torchscript", "onnx": "onnxruntime"}[kind]
        try:
            with open_runner(Runner(backend=backend), kind, out) as run:
                return disagreement(run, self.rows, self.expected, self.sizes)
        except VbpipeError as error:
            return error.what


def _one(asked: Export, each: Format, model: Model) -> dict[str, object]:
    """Return a step's own options: those of the other format at their defaults, so that they don't reach its key."""
    if each == "onnx":
        return {"formats": (each,), "model": model}
    fields = type(asked).model_fields
    defaults = {name: fields[name].default for name in ("opset", "exporter")}
    return {"formats": (each,), "model": model, **defaults}


def _example(model: Model) -> list[torch.Tensor]:
    """Return what exporters are shown: a made-up sample whose symbols are 2 or more, and all different.

    torch.export makes a constant of a size of 1, and one symbol of two equal sizes.
    """
    sizes: dict[str, int] = {}
    taken = {size for spec in model.inputs.values() for size in spec.shape if isinstance(size, int)}
    for name, dim in model.shapes.items():
        candidates = range(max(dim.min, 2), dim.max + 1)
        sizes[name] = next((size for size in candidates if size not in taken), dim.max)
        taken.add(sizes[name])
    row = samples.synthesize(model, sizes, seed=7)
    return [_torch_model.tensor_of(row[name]) for name in model.inputs]


def _no_grad() -> torch.no_grad:
    import torch

    return torch.no_grad()


def _trace(adapter: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> torch.jit.ScriptModule:
    import torch

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the check against eager says what a tracer warning only suspects
        # Example inputs would be stored in the file.
        return torch.jit.trace(adapter, tuple(tensors), check_trace=False, _store_inputs=False)


def _scripted(loaded: _torch_model.Loaded, reference: Reference) -> torch.nn.Module:
    """Return an adapter around the compiled module; its own part, which flattens, is traced by the caller."""
    import torch

    return _torch_model.adapt(
        torch.jit.script(loaded.module),
        tuple(reference.inputs),
        reference.outputs,
        clone_inputs=bool(reference.changes_inputs),
        like=loaded.module,
    )


def _save(program: torch.jit.ScriptModule, out: Path) -> Meta:
    _torchscript_file.save(program, out / "model.pt")
    return {"nodes": sum(1 for _ in program.inlined_graph.nodes())}


def _same_weights(loaded: _torch_model.Loaded, reference: Reference) -> None:
    if _torch_model.weights_sha256(loaded.module) != reference.weights_sha256:
        raise VbpipeError(
            "it gives other weights each time it is called.",
            where=reference.factory,
            hint="Load weights from a file, or draw them from a generator with a fixed seed.",
        )


def _advice(reference: Reference) -> str:
    unsteady = [note for note in reference.notes if note.startswith("not deterministic")]
    if unsteady:
        return "The model itself gives different outputs for the same input: make it deterministic in eval mode."
    return (
        "Branches on tensor values and sizes turned into numbers (`int(x.shape[0])`, `.item()`, `len(x)`) are the "
        "usual reason; set stages.export.formats to leave a format out."
    )


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


PLUGIN: type[Stage] = Export
