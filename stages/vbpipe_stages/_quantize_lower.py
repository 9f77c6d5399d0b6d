"""Rewrite chosen nodes of a graph into their quantized forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vbpipe_stages import _onnx_graph, _quantize_weights
from vbpipe_stages._calibration import Extent, Method
from vbpipe_stages._quantize_forms import Form
from vbpipe_stages._quantize_rules import HighPrecision
from vbpipe_stages._weighted_nodes import Weighted

if TYPE_CHECKING:
    import numpy as np
    import onnx

    Array = np.ndarray[Any, Any]

BLOCK_OPSET = 21
"""The first in which DequantizeLinear knows groups and 4-bit weights."""
FP8_OPSET = 19
"""The first in which Q/DQ know 8-bit floats."""
_FP8_LARGEST = 448.0
"""Of E4M3 without infinities (P. Micikevicius et al., "FP8 formats for deep learning", 2022)."""


def joined(model: onnx.ModelProto, forms: Mapping[str, Form], kept: frozenset[str]) -> dict[str, Form]:
    """Return tensor to the form that quantizes it where it is made: outputs of static Conv nodes.

    An activation behind it is included, and so is an Add of two such tensors, so that a residual block stays in 8 bits.

    Args:
        model: the float graph.
        forms: output tensor of a node to its form.
        kept: output tensors of nodes that a rule keeps.
    """
    readers = _onnx_graph.consumers(model.graph)
    outputs = {value.name for value in model.graph.output}
    inside = _onnx_graph.captured(model.graph)
    found: dict[str, Form] = {}
    for node in model.graph.node:
        output = node.output[0] if node.output else ""
        form = forms.get(output) if node.op_type == "Conv" else None
        form = form if form is not None and form.ends else None
        if node.op_type == "Add" and output not in kept and all(name in found for name in node.input):
            form = found[node.input[0]]
        if form is None or form.kind != "static":
            continue
        after = readers.get(output, [])
        alone = len(after) == 1 and output not in outputs and output not in inside
        if alone and after[0].op_type in ("Relu", "Clip"):
            output = after[0].output[0]
        found[output] = form
    return found


def observed(chosen: Mapping[str, Form], found: Mapping[str, Weighted], ends: Mapping[str, Form]) -> dict[str, Method]:
    """Return the tensors whose range is needed, and how each is cut."""
    wanted = {found[output].data: form.method for output, form in chosen.items() if form.kind == "static"}
    return {**wanted, **{tensor: form.method for tensor, form in ends.items()}}


def lower(
    model: onnx.ModelProto,
    chosen: Mapping[str, Form],
    found: Mapping[str, Weighted],
    ends: Mapping[str, Form],
    extents: Mapping[str, Extent],
) -> Lowered:
    """Return the graph with every quantized node of `chosen` rewritten; all floats in it are still float32."""
    import onnx

    result = onnx.ModelProto()
    result.CopyFrom(model)
    writer = _Writer(extents, ends, _scalars(model))
    for node in model.graph.node:
        output = node.output[0] if node.output else ""
        if output in chosen and chosen[output].kind != "half":
            writer.rewrite(found[output], chosen[output])
        else:
            writer.nodes.append(_copy(node))
        if output in ends:
            writer.end(output, ends[output])
    del result.graph.node[:]
    result.graph.node.extend(writer.nodes)
    result.graph.initializer.extend(writer.weights.values())
    # Types of tensors that are now integers, and shapes that no longer hold.
    del result.graph.value_info[:]
    _onnx_graph.drop_unused(result.graph)
    _declare(result, list(chosen.values()))
    return Lowered(result, writer.origins, writer.high)


@dataclass(frozen=True)
class Lowered:
    """A rewritten graph: `origins` has new tensor to the old one that it stands for, `high` new tensor to its type."""

    model: onnx.ModelProto
    origins: Mapping[str, str]
    high: Mapping[str, HighPrecision]


@dataclass
class _Writer:
    """The graph being written; what two nodes share is written once."""

    extents: Mapping[str, Extent]
    ends: Mapping[str, Form]
    floors: Mapping[str, float]
    """Scalar constants: the lower bounds of Clip nodes are among them."""
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, onnx.TensorProto] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    high: dict[str, HighPrecision] = field(default_factory=dict)
    shared: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)

    def rewrite(self, item: Weighted, form: Form) -> None:
        """Write a node's form; everything that it takes computes in the form's high precision."""
        start = len(self.nodes)
        self._write(item, form)
        self.high |= {node.output[0]: form.high for node in self.nodes[start:]}

    def _write(self, item: Weighted, form: Form) -> None:
        output = item.node.output[0]
        if item.node.op_type == "Conv":
            self._conv(item, form)
        elif form.kind == "table":
            self._table(item, form)
        elif form.kind == "static" and item.node.op_type == "Gemm":
            self._gemm(item, form)
        else:
            product = output if item.bias is None else f"{output}__product"
            write = {"static": self._static, "dynamic": self._dynamic, "weight_only": self._weight_only}[form.kind]
            write(item, form, product)
            if item.bias is not None:
                self.add("Add", [product, self.constant(f"{output}__bias", item.bias)], [output], output)

    def end(self, tensor: str, form: Form) -> None:
        """Quantize `tensor` where the last written node makes it, so that whoever reads it reads 8 bits.

        Rounding to a range from zero up saturates as a Relu or Clip in front of it does, so that one is left out:
        ONNX Runtime would merge it into a float convolution before it looks for 8-bit ones.
        """
        last = self.nodes[-1]
        if self._is_implied(last, form):
            self.nodes.pop()
            raw = last.input[0]
        else:
            raw = f"{tensor}__float"
            last.output[0] = raw
            self.origins[raw] = tensor
        self._quantize_dequantize(raw, tensor, tensor, form)

    def add(self, op: str, inputs: Sequence[str], outputs: Sequence[str], stands_for: str, **attributes: Any) -> None:
        import onnx

        self.nodes.append(
            onnx.helper.make_node(op, list(inputs), list(outputs), name=f"{outputs[0]}/{op}", **attributes)
        )
        self.origins |= dict.fromkeys(outputs, stands_for)

    def constant(self, name: str, value: Array) -> str:
        import numpy as np
        import onnx

        if name not in self.weights:
            self.weights[name] = onnx.numpy_helper.from_array(np.ascontiguousarray(value), name)
        return name

    def _static(self, item: Weighted, form: Form, product: str) -> None:
        data = self._activation(item.data, form)
        weight = self._weight(item, form, axis=1)
        self.add("MatMul", [data, weight], [product], item.node.output[0])

    def _gemm(self, item: Weighted, form: Form) -> None:
        """Keep a Gemm: ONNX Runtime would merge MatMul and Add back into one, which it runs in float."""
        output = item.node.output[0]
        inputs = [self._activation(item.data, form), self._weight(item, form, axis=1)]
        if item.bias is not None:
            inputs.append(self._bias(item, form, item.bias))
        self.add("Gemm", inputs, [output], output)

    def _bias(self, item: Weighted, form: Form, bias: Array) -> str:
        """Return the bias, in 32 bits where the target's 8-bit Gemm takes no other."""
        import numpy as np
        from onnx import numpy_helper

        output = item.node.output[0]
        if not form.contrib:
            return self.constant(f"{output}__bias", bias)
        _, weight_scale, _ = self._rounded(item, form, axis=1)
        data_scale, _ = _quantize_weights.activation(self.extents[item.data], form.activation, symmetric=form.symmetric)
        scale = numpy_helper.to_array(self.weights[weight_scale]) * np.float32(data_scale)
        wide = np.broadcast_to(bias.reshape(-1), (item.weight.shape[1],)).astype(np.float64)
        values = np.rint(wide / scale).clip(-(2**31), 2**31 - 1).astype(np.int32)
        names = [self.constant(f"{output}__bias", values), self.constant(f"{output}__bias_scale", scale)]
        along = {"axis": 0} if scale.ndim else {}
        self.add("DequantizeLinear", names, [f"{output}__bias_dequantized"], output, **along)
        return f"{output}__bias_dequantized"

    def _conv(self, item: Weighted, form: Form) -> None:
        data = self._activation(item.data, form)
        node = _copy(item.node)
        node.input[0], node.input[1] = data, self._weight(item, form, axis=0)
        self.nodes.append(node)

    def _activation(self, tensor: str, form: Form) -> str:
        """Return the tensor that holds `tensor` rounded; one that is rounded where it is made is used as it is."""
        end = self.ends.get(tensor)
        if end is not None and (end.activation, end.symmetric) == (form.activation, form.symmetric):
            return tensor
        key = ("qdq", tensor, form.activation, str(form.symmetric), form.high)
        if key not in self.shared:
            rounded = f"{tensor}__{form.activation}{'_symmetric' if form.symmetric else ''}{_suffix(form)}"
            self._quantize_dequantize(tensor, rounded, tensor, form)
            self.shared[key] = (rounded,)
        return self.shared[key][0]

    def _is_implied(self, node: onnx.NodeProto, form: Form) -> bool:
        if form.symmetric or node.op_type not in ("Relu", "Clip"):
            return False
        floor = 0.0 if node.op_type == "Relu" else self.floors.get(node.input[1] if len(node.input) > 1 else "")
        return floor == 0.0

    def _quantize_dequantize(self, source: str, target: str, measured: str, form: Form) -> None:
        import numpy as np

        if form.activation == "fp8":
            extent = self.extents[measured]
            scale = _held(max(-extent.low, extent.high) / _FP8_LARGEST, form)
            inputs = [self.constant(f"{target}__scale", scale), self._fp8(f"{target}__zero_point", np.zeros(()))]
        else:
            step, zero = _quantize_weights.activation(self.extents[measured], form.activation, symmetric=form.symmetric)
            inputs = [
                self.constant(f"{target}__scale", _held(step, form)),
                self.constant(f"{target}__zero_point", np.asarray(zero, form.activation)),
            ]
        self.add("QuantizeLinear", [source, *inputs], [f"{target}__quantized"], measured)
        self.add("DequantizeLinear", [f"{target}__quantized", *inputs], [target], measured)

    def _weight(self, item: Weighted, form: Form, axis: int) -> str:
        values, scale, zero = self._rounded(item, form, axis)
        dequantized = f"{values}__dequantized"
        key = ("weight", dequantized)
        if key not in self.shared:
            along = {"axis": axis} if form.per_channel else {}
            self.add("DequantizeLinear", [values, scale, zero], [dequantized], item.node.output[0], **along)
            self.shared[key] = (dequantized,)
        return dequantized

    def _rounded(self, item: Weighted, form: Form, axis: int) -> tuple[str, str, str]:
        if form.dtype == "fp8":
            return self._rounded_fp8(item, form)
        name = f"{item.weight_name}__{'channel' if form.per_channel else 'tensor'}{axis}_{form.largest}{_suffix(form)}"
        if name not in self.weights:
            along = axis if form.per_channel else None
            rounded = _quantize_weights.symmetric_int8(item.weight, along, form.largest, form.high)
            self.constant(name, rounded.values)
            self.constant(f"{name}__scale", rounded.scale)
            self.constant(f"{name}__zero_point", rounded.zero_point)
        return name, f"{name}__scale", f"{name}__zero_point"

    def _rounded_fp8(self, item: Weighted, form: Form) -> tuple[str, str, str]:
        import numpy as np

        name = f"{item.weight_name}__fp8{_suffix(form)}"
        if name not in self.weights:
            scale = _held(float(np.abs(item.weight).max()) / _FP8_LARGEST, form)
            self._fp8(name, (item.weight / scale).clip(-_FP8_LARGEST, _FP8_LARGEST))
            self.constant(f"{name}__scale", scale)
            self._fp8(f"{name}__zero_point", np.zeros(()))
        return name, f"{name}__scale", f"{name}__zero_point"

    def _fp8(self, name: str, values: Array) -> str:
        import ml_dtypes
        import numpy as np
        import onnx

        if name not in self.weights:
            rounded = values.astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
            self.weights[name] = onnx.helper.make_tensor(
                name, onnx.TensorProto.FLOAT8E4M3FN, values.shape, rounded.tobytes(), raw=True
            )
        return name

    def _dynamic(self, item: Weighted, form: Form, product: str) -> None:
        tensor, output = item.data, item.node.output[0]
        key = ("dynamic", tensor)
        if key not in self.shared:
            made = (f"{tensor}__dynamic", f"{tensor}__dynamic_scale", f"{tensor}__dynamic_zero_point")
            self.add("DynamicQuantizeLinear", [tensor], made, tensor)
            self.shared[key] = made
        data, data_scale, data_zero = self.shared[key]
        weight, weight_scale, weight_zero = self._rounded(item, form, axis=1)
        # In this order and shape ONNX Runtime finds its fused kernel for the four.
        self.add("MatMulInteger", [data, weight, data_zero, weight_zero], [f"{product}__sum"], output)
        self.add("Cast", [f"{product}__sum"], [f"{product}__cast"], output, to=1)
        self.add("Mul", [data_scale, weight_scale], [f"{product}__scale"], output)
        self.add("Mul", [f"{product}__cast", f"{product}__scale"], [product], output)

    def _weight_only(self, item: Weighted, form: Form, product: str) -> None:
        if form.contrib:
            self._matmul_nbits(item, form, product)
            return
        dequantized = self._weight(item, form, axis=1) if form.group is None else self._blocked(item, form, form.group)
        self.add("MatMul", [item.data, dequantized], [product], item.node.output[0])

    def _matmul_nbits(self, item: Weighted, form: Form, product: str) -> None:
        assert form.group is not None, "MatMulNBits has groups"
        rows, columns = item.weight.shape
        name = f"{item.weight_name}__bits{form.bits}_{form.group}{'' if form.symmetric else '_asymmetric'}"
        if name not in self.weights:
            rounded = _quantize_weights.blocks(item.weight, form.bits, form.group, symmetric=form.symmetric)
            values, scales, zeros = _quantize_weights.packed(rounded, form.bits, form.group)
            self.constant(name, values)
            self.constant(f"{name}__scale", scales)
            if not form.symmetric:
                self.constant(f"{name}__zero_point", zeros)
        zero_point = [] if form.symmetric else [f"{name}__zero_point"]
        self.add(
            "MatMulNBits",
            [item.data, name, f"{name}__scale", *zero_point],
            [product],
            item.node.output[0],
            domain="com.microsoft",
            K=rows,
            N=columns,
            bits=form.bits,
            block_size=form.group,
            accuracy_level=form.accuracy_level,
        )

    def _blocked(self, item: Weighted, form: Form, group: int) -> str:
        import numpy as np
        import onnx

        scheme = "" if form.symmetric else "_asymmetric"
        name = f"{item.weight_name}__grouped{form.bits}_{group}{scheme}{_suffix(form)}"
        dequantized = f"{name}__dequantized"
        if ("weight", dequantized) in self.shared:
            return dequantized
        rounded = _quantize_weights.blocks(item.weight, form.bits, group, symmetric=form.symmetric, kind=form.high)
        middle = 2 ** (form.bits - 1)
        kind = onnx.TensorProto.INT4 if form.bits == 4 else onnx.TensorProto.INT8
        # A zero point of 0 is left out: TensorRT's parser takes none for 4-bit weights.
        parts = {"": rounded.values} | ({} if form.symmetric else {"__zero_point": rounded.zero_point})
        for suffix, part in parts.items():
            # Signed, because that is what other builders of this form take.
            signed = (part.astype(np.int16) - middle).astype(np.int8)
            self.weights[f"{name}{suffix}"] = onnx.helper.make_tensor(
                f"{name}{suffix}", kind, signed.shape, _raw(signed, form.bits), raw=True
            )
        self.constant(f"{name}__scale", rounded.scale)
        inputs = [name, f"{name}__scale", *(f"{name}{suffix}" for suffix in parts if suffix)]
        self.add("DequantizeLinear", inputs, [dequantized], item.node.output[0], axis=0, block_size=group)
        self.shared[("weight", dequantized)] = (dequantized,)
        return dequantized

    def _table(self, item: Weighted, form: Form) -> None:
        values, scale, _ = self._rounded(item, form, axis=0)
        output = item.node.output[0]
        self.add("Gather", [values, item.data], [f"{output}__rows"], output, axis=0)
        self.add("Cast", [f"{output}__rows"], [f"{output}__cast"], output, to=1)
        if not form.per_channel:
            self.add("Mul", [f"{output}__cast", scale], [output], output)
            return
        column = self.constant(f"{scale}_column", _column(self.weights[scale]))
        self.add("Gather", [column, item.data], [f"{output}__scale"], output, axis=0)
        self.add("Mul", [f"{output}__cast", f"{output}__scale"], [output], output)


def _scalars(model: onnx.ModelProto) -> dict[str, float]:
    from onnx import numpy_helper

    tensors = _onnx_graph.constants(model.graph)
    return {name: float(numpy_helper.to_array(t).reshape(())) for name, t in tensors.items() if not t.dims}


def _copy(node: onnx.NodeProto) -> onnx.NodeProto:
    import onnx

    made = onnx.NodeProto()
    made.CopyFrom(node)
    return made


def _suffix(form: Form) -> str:
    """Return what keeps apart tensors that are made once for each type of what reads them."""
    return "" if form.high == "fp32" else f"_{form.high}"


def _held(scale: float, form: Form) -> Array:
    return _quantize_weights.held(_quantize_weights.usable(scale), form.high)


def _raw(values: Array, bits: int) -> bytes:
    """Return the bytes of a tensor; two 4-bit numbers share one, the first in the low half."""
    import numpy as np

    if bits == 8:
        return values.tobytes()
    flat = values.reshape(-1).astype(np.uint8) & 0xF
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    return (flat[0::2] | (flat[1::2] << 4)).tobytes()


def _column(scale: onnx.TensorProto) -> Array:
    from onnx import numpy_helper

    values: Array = numpy_helper.to_array(scale)
    return values.reshape(-1, 1)


def _declare(model: onnx.ModelProto, forms: Sequence[Form]) -> None:
    """Name the operator sets that the new nodes need."""
    import onnx

    grouped = [form for form in forms if form.kind == "weight_only" and form.group is not None]
    if any(form.contrib for form in grouped) and all(e.domain != "com.microsoft" for e in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    needed = BLOCK_OPSET if any(not form.contrib for form in grouped) else 0
    needed = max(needed, FP8_OPSET if any(form.dtype == "fp8" for form in forms) else 0)
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = max(entry.version, needed)
    model.ir_version = max(model.ir_version, 10 if needed >= BLOCK_OPSET else 9 if needed else 0)
