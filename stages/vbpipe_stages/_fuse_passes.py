"""The graph rewrites that `fuse` applies, each a function from graph to graph."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vbpipe_stages import _onnx_graph
from vbpipe_stages._fuse_attention import fuse_attention

if TYPE_CHECKING:
    import onnx
    import onnx_ir

PassName = Literal["fold", "transformer", "attention", "transformer_optimizer", "onnxruntime"]
Level = Literal["none", "basic", "extended", "all"]


@dataclass(frozen=True)
class Setting:
    """What a pass may do: `contrib` allows `com.microsoft` operators, `pack_attention` merges Q, K and V into one."""

    contrib: bool
    pack_attention: bool


@dataclass(frozen=True)
class Pass:
    """A rewrite; `apply` returns a new graph and leaves its argument alone."""

    name: PassName
    level: Level
    """The lowest level at which it runs."""
    contrib: bool
    """Whether it has nothing to do without `com.microsoft` operators."""
    apply: Callable[[onnx.ModelProto, Setting], onnx.ModelProto]


def fold(model: onnx.ModelProto, setting: Setting) -> onnx.ModelProto:
    """Fold constants, drop what is redundant or unused: onnxscript's optimizer, standard operators only."""
    import onnx_ir as ir
    from onnxscript import optimizer

    del setting
    graph = ir.from_proto(model)
    optimizer.optimize(graph)
    return ir.to_proto(graph)


def transformer(model: onnx.ModelProto, setting: Setting) -> onnx.ModelProto:
    """Fuse attention, normalization and activation patterns of torch.export's graphs: onnxscript's ort_fusions.

    The order is that of `onnxscript.rewriter.ort_fusions.optimize_for_ort`, less its last rules, which write
    FusedMatMul: no quantizer reads that. Q, K and V are packed into one Attention only on request, for then their
    weights are one tensor that no per-layer rule can address, and whose mask rules out QAttention.

    Raises:
        ImportError, AttributeError: this onnxscript has other fusions.
    """
    import onnx_ir as ir
    from onnx_ir.passes import common
    from onnxscript import optimizer
    from onnxscript.rewriter.ort_fusions import shape_optimization

    graph = ir.from_proto(model)
    common.ShapeInferencePass()(graph)
    optimizer.optimize(graph)
    shape_optimization.rules.apply_to_model(graph)
    optimizer.optimize(graph)
    for name in ("erfgelu.fuse_erfgelu", "rms_normalization.fuse_rms_normalization"):
        _fuse(graph, name)
    for name in ("skip_layer_normalization", "skip_rms_normalization"):
        _fuse(graph, f"skip_normalization.fuse_{name}")
    _fuse(graph, "rotary_embedding.fuse_rotary_embedding")
    _fuse(graph, "cos_sin_cache.fuse_cos_sin_cache")
    common.CommonSubexpressionEliminationPass()(graph)
    _fuse(graph, "rotary_embedding.fuse_partial_rotary_embedding")
    _fuse_attention(graph, setting.pack_attention)
    for name in ("gelu.fuse_gelu", "bias_gelu.fuse_bias_gelu", "sdpa_via_mha.replace_sdpa_by_mha"):
        _fuse(graph, name)
    optimizer.optimize(graph)
    return ir.to_proto(graph)


def transformer_optimizer(model: onnx.ModelProto, setting: Setting) -> onnx.ModelProto:
    """Fuse the patterns of older exports: ONNX Runtime's transformer optimizer, which finds heads and sizes itself."""
    from onnxruntime.transformers import optimizer
    from onnxruntime.transformers.fusion_options import FusionOptions

    options = FusionOptions("bert")
    options.use_multi_head_attention = not setting.pack_attention
    with tempfile.TemporaryDirectory() as folder, _quiet():
        _onnx_graph.write(model, Path(folder))
        fused = optimizer.optimize_model(
            str(Path(folder) / _onnx_graph.MODEL),
            "bert",
            optimization_options=options,
            opt_level=0,
            only_onnxruntime=False,
        )
        fused.topological_sort()
        return fused.model


def onnxruntime_offline(model: onnx.ModelProto, setting: Setting) -> onnx.ModelProto:
    """Apply ONNX Runtime's own rewrites: its basic level, and its extended level where `contrib` allows.

    Those that merge an activation or a scale into a Conv, Gemm or MatMul are left to `build`, which does them anyway:
    here they would hide the weights from `quantize`.
    """
    import onnxruntime as ort

    level = ort.GraphOptimizationLevel
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = level.ORT_ENABLE_EXTENDED if setting.contrib else level.ORT_ENABLE_BASIC
    with tempfile.TemporaryDirectory() as source, tempfile.TemporaryDirectory() as out:
        _onnx_graph.write(model, Path(source))
        options.optimized_model_filepath = str(Path(out) / _onnx_graph.MODEL)
        if (Path(source) / _onnx_graph.DATA).exists():
            options.add_session_config_entry(
                "session.optimized_model_external_initializers_file_name", _onnx_graph.DATA
            )
        ort.InferenceSession(
            str(Path(source) / _onnx_graph.MODEL),
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=list(_HIDE_WEIGHTS),
        )
        return _onnx_graph.read(Path(out))


PASSES: tuple[Pass, ...] = (
    Pass("fold", "basic", contrib=False, apply=fold),
    Pass("transformer", "all", contrib=True, apply=transformer),
    Pass("attention", "all", contrib=True, apply=lambda model, setting: fuse_attention(model)),
    Pass("transformer_optimizer", "all", contrib=True, apply=transformer_optimizer),
    Pass("onnxruntime", "basic", contrib=False, apply=onnxruntime_offline),
)
"""In the order in which they run."""

LEVELS: Mapping[Level, int] = {"none": 0, "basic": 1, "extended": 2, "all": 3}

_HIDE_WEIGHTS = (
    "ConvActivationFusion",
    "ConvAddActivationFusion",
    "GemmActivationFusion",
    "MatMulActivationFusion",
    "MatMulScaleFusion",
    "MatmulTransposeFusion",
)


def _fuse_attention(graph: onnx_ir.Model, pack: bool) -> None:
    """Turn scaled dot products into (Multi)HeadAttention, or GroupQueryAttention where keys are shared."""
    _fuse(graph, "sdpa.fuse_sdpa", apply_shape_inference=True)
    _fuse(graph, "gqa.fuse_gqa")
    _fuse(graph, "gqa_packed_qkv.fuse_qkv_gqa")
    fused = _fuse(graph, "mha.fuse_mha1") + _fuse(graph, "mha.fuse_mha2")
    _fuse(graph, "mha_scale.fuse_mha_scale")
    if fused:
        _fuse(graph, "mha_bias.fuse_mha_bias")
        if pack:
            _fuse(graph, "attention.fuse_attention")


def _fuse(graph: onnx_ir.Model, name: str, *, apply_shape_inference: bool = False) -> int:
    module, function = name.split(".")
    fuse = getattr(importlib.import_module(f"onnxscript.rewriter.ort_fusions.{module}"), function)
    return int(fuse(graph, apply_shape_inference=True) if apply_shape_inference else fuse(graph))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the optimizer's own log lines and prints off the terminal."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(level)
