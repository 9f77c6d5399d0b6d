"""Load a recipe's PyTorch model, check it, and adapt it to a flat list of named tensors."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vbpipe.core import Run
from vbpipe.errors import EngineError, VbpipeError
from vbpipe.recipe.model import Model
from vbpipe.recipe.references import resolve
from vbpipe_stages._binding import Arguments, bind
from vbpipe_stages._interface import Interface
from vbpipe_stages._user_code import blame, brief, seed

if TYPE_CHECKING:
    import numpy as np
    import torch

    Array = np.ndarray[Any, Any]

PREFIX = "model"
"""The attribute of the adapter that holds the recipe's module; exporters put it in front of every path."""


@dataclass(frozen=True)
class Loaded:
    """A recipe's model, ready to run or to export."""

    module: torch.nn.Module
    """What the factory returned, in eval mode, without gradients."""
    adapter: torch.nn.Module
    """forward(*tensors) -> tuple of tensors, in the order of the recipe's inputs and outputs."""
    train_mode_fixed: bool
    """Whether the factory returned it (or a part of it) in train mode."""


def load(model: Model, root: Path, *, clone_inputs: bool = False) -> Loaded:
    """Build and check the model.

    Random generators are seeded first, so a factory that draws its weights gives the same ones each time.

    Args:
        clone_inputs: let forward() work on copies, for a model that changes its inputs in place.

    Raises:
        VbpipeError: the factory raises or gives no module, a weight is NaN, infinite, lazy or not on the CPU, or
            the inputs don't fit forward().
    """
    import torch

    factory = resolve(model.factory, root)
    seed()
    with blame(f"model.factory {model.factory}", root, where=model.factory):
        built = factory(**model.args)
    module = getattr(built, "_orig_mod", built)  # torch.compile's wrapper: engines start from what it wraps
    if not isinstance(module, torch.nn.Module):
        raise _not_a_module(model.factory, module)
    _check_weights(module, model.factory)
    trained = any(getattr(part, "training", False) for part in module.modules())
    module.eval()
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    return Loaded(module, adapt(module, tuple(model.inputs), model.outputs, clone_inputs=clone_inputs), trained)


def adapt(
    module: torch.nn.Module,
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    clone_inputs: bool = False,
    like: torch.nn.Module | None = None,
) -> torch.nn.Module:
    """Return a module whose forward(*tensors) gives a flat tuple; usable by trace, torch.export and torch.onnx.

    Args:
        clone_inputs: hand `module` copies of its inputs.
        like: the module that tells how inputs reach forward(), where `module` is compiled from it.
    """
    import torch

    shown = like or module
    compiled = isinstance(shown, torch.jit.ScriptModule)  # its forward has no Python signature
    arguments = bind(inputs, _by_position if compiled else shown.forward)

    class Adapter(torch.nn.Module):  # type: ignore[misc]  # torch's types are skipped, see pyproject.toml
        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            given = tuple(tensor.clone() for tensor in tensors) if clone_inputs else tensors
            return _call(self.model, arguments, given, outputs)

    adapter: torch.nn.Module = Adapter().eval()
    return adapter


def run(adapter: torch.nn.Module, model: Model, sample: Mapping[str, Array]) -> dict[str, Array]:
    """Run one sample (arrays by input name) and return arrays by output name; inputs are left as they are."""
    import torch

    with torch.inference_mode():
        tensors = [tensor_of(sample[name]).clone() for name in model.inputs]
        return to_arrays(model.outputs, adapter(*tensors))


def unavailable() -> str | None:
    """Return that torch is not installed and the command that installs it, or None."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed: pip install 'vbpipe[build]'."
    return None


@contextmanager
def opened(program: torch.nn.Module, interface: Interface, threads: int) -> Iterator[Run]:
    """Give the Run of a module that takes and gives a flat tuple of tensors, on `threads` threads while it is open."""
    held = [program]

    def run_once(arrays: Mapping[str, Array]) -> dict[str, Array]:
        if not held:
            raise EngineError("it was closed.", hint="Run inside the `with` block that opened it.")
        interface.check(arrays)
        return _run_checked(held[0], interface, arrays)

    with torch_threads(threads):
        try:
            yield run_once
        finally:
            held.clear()


def tensor_of(array: Array) -> torch.Tensor:
    """Return a tensor that shares the array's memory; a copy where torch can't (read-only or reversed arrays)."""
    import numpy as np
    import torch

    shareable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array if shareable else np.array(array))


def to_arrays(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> dict[str, Array]:
    """Return tensors as numpy arrays by name, without a copy; raises EngineError for types that numpy lacks."""
    found: dict[str, Array] = {}
    for name, tensor in zip(names, tensors, strict=True):
        try:
            found[name] = tensor.numpy()
        except (TypeError, RuntimeError) as error:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise EngineError(
                f"output {name!r} is {kind} ({tensor.layout}), which numpy has no type for.",
                where="model.outputs",
                hint="Let forward() return it as `.float()`.",
            ) from error
    return found


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run torch's operators on `count` threads inside."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def weights_sha256(module: torch.nn.Module) -> str:
    """Return the sha256 (hex) over all parameters and buffers: name, dtype, shape, bytes, sorted by name."""
    import torch

    found = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    digest = hashlib.sha256()
    for name in sorted(found):
        tensor = found[name].detach()
        digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _run_checked(program: torch.nn.Module, interface: Interface, arrays: Mapping[str, Array]) -> dict[str, Array]:
    import torch

    try:
        with torch.inference_mode():
            found = program(*[tensor_of(arrays[name]) for name in interface.inputs])
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        shapes = {name: list(array.shape) for name, array in arrays.items()}
        raise EngineError(f"it fails on inputs of shapes {shapes}: {brief(error)}") from error
    return to_arrays(interface.outputs, found)


def _by_position(*tensors: object) -> None:
    """Stand for a forward() that is only known to take positions."""


def _not_a_module(factory: str, built: object) -> VbpipeError:
    if isinstance(built, type):
        return VbpipeError(f"it returned the class {built.__name__}.", where=factory, hint="Return an instance of it.")
    return VbpipeError(
        f"it returned a {type(built).__name__}, not a torch.nn.Module.",
        where=factory,
        hint="A state dict has to be loaded into its module first.",
    )


def _check_weights(module: torch.nn.Module, factory: str) -> None:
    """Buffers may hold infinity: attention masks do."""
    import torch

    parameters = list(module.named_parameters())
    for name, tensor in (*parameters, *module.named_buffers()):
        if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
            raise VbpipeError(
                f"parameter {name} has no shape yet.", where=factory, hint="Run the lazy module once in the factory."
            )
        if tensor.device.type != "cpu":
            raise VbpipeError(
                f"parameter {name} is on {tensor.device}.",
                where=factory,
                hint="Build the model on the CPU, with weights.",
            )
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise VbpipeError(f"parameter {name} holds NaN.", where=factory, hint="Load sound weights.")
    for name, tensor in parameters:
        if tensor.is_floating_point() and bool(tensor.isinf().any()):
            raise VbpipeError(f"parameter {name} holds infinity.", where=factory, hint="Load sound weights.")


def _call(
    module: torch.nn.Module, arguments: Arguments, tensors: Sequence[torch.Tensor], outputs: Sequence[str]
) -> tuple[torch.Tensor, ...]:
    args, kwargs = arguments.fill(tensors)
    return _flat(module(*args, **kwargs), outputs)


def _flat(returned: Any, names: Sequence[str]) -> tuple[torch.Tensor, ...]:
    """Return what forward() gave as one tensor per name: by key where every name is a key, else in order."""
    keyed = _keyed(returned)
    if keyed is not None and all(name in keyed for name in names):
        returned = [keyed[name] for name in names]
    leaves = list(_leaves(returned, ""))
    if len(leaves) != len(names):
        came = ", ".join(f"{path or 'a tensor'} {_shown(tensor)}" for path, tensor in leaves) or "nothing"
        raise VbpipeError(
            f"forward() returned {len(leaves)} tensors ({came}); the recipe names {len(names)}: {', '.join(names)}.",
            where="model.outputs",
        )
    return tuple(tensor for _, tensor in leaves)


def _keyed(returned: Any) -> Mapping[str, Any] | None:
    if isinstance(returned, Mapping):
        return returned
    if dataclasses.is_dataclass(returned) and not isinstance(returned, type):
        return {field.name: getattr(returned, field.name) for field in dataclasses.fields(returned)}
    if isinstance(returned, tuple) and hasattr(returned, "_asdict"):
        return returned._asdict()  # type: ignore[no-any-return]  # a named tuple's own method
    return None


def _leaves(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) depth first; None is left out, as optional outputs are None."""
    import torch

    if value is None:
        return
    keyed = _keyed(value)
    if isinstance(value, torch.Tensor):
        yield path, value
    elif keyed is not None:
        for key, item in keyed.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        raise VbpipeError(
            f"forward() returned a {type(value).__name__}{f' at {path}' if path else ''}, not a tensor.",
            where="model.outputs",
            hint="Return tensors only, or wrap the model in the factory; a cache is switched off by use_cache=False.",
        )


def _shown(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
