"""Turn what `vbpipe bench` is given (bundles, stored steps, eager models, files) into candidates and inputs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vbpipe import measure, plugins, runtime, samples
from vbpipe.errors import UsageError
from vbpipe.recipe.load import load
from vbpipe.runner import Runner, own_runner
from vbpipe.store import Entry, Store

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_FILES = {".onnx": "onnx", ".pt": "torchscript"}


@dataclass(frozen=True)
class Found:
    """Something that can be timed, and one sample of its inputs where it brings one."""

    candidate: measure.Candidate
    threads: int | None
    sample: Mapping[str, Array] | None


def find(what: str, store: Store, inputs: Mapping[str, Array] | None, scratch: Path) -> Found:
    """Return what `what` names.

    Args:
        what: a bundle's directory; "eager:RECIPE"; an .onnx or TorchScript .pt file; or a step of the store, by its
            name ("minilm/int8/cpu/quantize") or the start of a digest.
        store: where steps are looked up.
        inputs: named arrays to run it on; a file needs them, to know what it takes.
        scratch: an empty directory for copies of files.

    Raises:
        UsageError: there is no such thing, or it can't be run by itself.
    """
    path = Path(what)
    if path.is_dir():
        return _bundle(what, path)
    if what.startswith("eager:"):
        return _eager(what, Path(what.removeprefix("eager:")), store)
    if path.suffix in _FILES:
        return _file(what, path, inputs, scratch)
    return _stored(what, store)


def sample_for(found: Sequence[Found], inputs: Mapping[str, Array] | None) -> Mapping[str, Array]:
    """Return the inputs that all are timed on: those given, else the first that one of them brings."""
    if inputs is not None:
        return inputs
    brought = next((one.sample for one in found if one.sample is not None), None)
    if brought is None:
        raise UsageError("nothing here brings a sample of its inputs.", where="bench", hint="Give one with --inputs.")
    return brought


def _bundle(what: str, path: Path) -> Found:
    manifest = runtime.read_manifest(path)
    runtime.check_files(path, manifest)
    runner = manifest.runner
    candidate = measure.Candidate(what, runner.backend, dict(runner.options), manifest.kind, path / manifest.engine)
    return Found(candidate, runner.threads, samples.load(path / manifest.golden.inputs)[0])


def _eager(what: str, recipe: Path, store: Store) -> Found:
    loaded = load(recipe)
    variant, target = next(iter(loaded.variants)), next(iter(loaded.targets))
    name = f"{loaded.name}/{variant}/{target}/eager"
    entry = _entry(name, store)
    path = store.layout.object(entry.digest)
    candidate = measure.Candidate(what, "eager", {}, entry.kind, path, root=loaded.root)
    return Found(candidate, None, _stored_sample(entry, store))


def _stored(what: str, store: Store) -> Found:
    entry = _entry(what, store)
    runner = _runner(entry)
    if runner is None or entry.kind == "reference":
        hint = (
            "Name eager as eager:RECIPE." if entry.kind == "reference" else "Name a step that makes something to run."
        )
        raise UsageError(f"a {entry.kind} can't be run by itself.", where=what, hint=hint)
    path = store.layout.object(entry.digest)
    candidate = measure.Candidate(what, runner.backend, dict(runner.options), entry.kind, path)
    return Found(candidate, None, _stored_sample(entry, store))


def _entry(name: str, store: Store) -> Entry:
    entry = store.why(name)[0].entry
    if store.get(entry.key) is None:
        raise UsageError("it is damaged in the store.", where=name, hint="Build again.")
    return entry


def _runner(entry: Entry) -> Runner | None:
    parts = entry.key.parts
    own = own_runner(entry.kind)
    if own is not None:
        return own
    if entry.kind == "engine" and "options.backend" in parts:
        prefix = "options.options."
        options = {key.removeprefix(prefix): json.loads(v) for key, v in parts.items() if key.startswith(prefix)}
        return Runner(backend=json.loads(parts["options.backend"]), options=options)
    return None


def _stored_sample(entry: Entry, store: Store) -> Mapping[str, Array] | None:
    digest = entry.key.parts.get("input.samples")
    file = store.layout.object(digest) / "check.safetensors" if digest else None
    return samples.load(file)[0] if file is not None and file.exists() else None


def _file(what: str, path: Path, inputs: Mapping[str, Array] | None, scratch: Path) -> Found:
    if not path.is_file():
        raise UsageError("there is no such file.", where=what)
    if inputs is None:
        raise UsageError("a file does not say what it takes.", where=what, hint="Give named arrays with --inputs.")
    kind = _FILES[path.suffix]
    runner = own_runner(kind)
    assert runner is not None, "the kinds of files have runtimes of their own"
    backend = plugins.backend(runner.backend)
    adopt = getattr(backend, "adopt", None)
    if adopt is None:
        raise UsageError(f"backend {backend.name!r} takes no files.", where=what)
    place = scratch / f"{len(list(scratch.iterdir()))}"
    place.mkdir()
    adopt(path, place, inputs)
    return Found(measure.Candidate(what, backend.name, {}, kind, place), None, None)
