"""Rewrite composite operators in terms of those that the server or the node has.

    requires  a simplified model of opset 21 or newer whose shapes are known, with a batch of 1
    ensures   recurrent layers are unrolled, quantised operators with weights are float ones, Split is Slices, Concat
              with constants is Pad and Add, and what changes nothing is gone; nothing new holds the batch's size

| module     | operators                                              | become                                        |
|------------|--------------------------------------------------------|-----------------------------------------------|
| quantised  | QLinearConv, QLinearMatMul, ConvInteger, MatMulInteger | Conv and MatMul of float32, Quantize, Round   |
| quantised  | DequantizeLinear of constants                          | constants                                     |
| quantised  | DynamicQuantizeLinear                                  | extremes and scale of every sample            |
| recurrent  | LSTM, GRU, RNN                                         | a MatMul for all inputs, one for every step   |
| splitting  | Split; Concat with constants                           | Slice; Pad and Add                            |
| identities | Reshape to the same shape, Mul by 1, Sum of one, ...   | nothing                                       |

Each module states its formulas; their source is the ONNX operator specification, https://onnx.ai/onnx/operators/. An
operator that can't be rewritten is left, and `why_left` tells why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from partitioner.misfits import blamed
from partitioner.rewriting import quantised, recurrent
from partitioner.rewriting.identities import remove_identities
from partitioner.rewriting.quantised import dequantise_constants, rewrite_quantised
from partitioner.rewriting.recurrent import unroll
from partitioner.rewriting.splitting import rewrite_concat, rewrite_split

_STANDARD_DOMAINS = ("", "ai.onnx")
_Rewriting = Callable[[ir.Node], None]

_QUANTISED: Mapping[str, _Rewriting] = dict.fromkeys(
    ("QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear"), rewrite_quantised
)
_COMPOSITES: Mapping[str, _Rewriting] = {
    "LSTM": unroll,
    "GRU": unroll,
    "RNN": unroll,
    "Split": rewrite_split,
    "Concat": rewrite_concat,
}
_OBSTACLES: Mapping[str, Callable[[ir.Node], str | None]] = {
    "LSTM": recurrent.obstacle,
    "GRU": recurrent.obstacle,
    "RNN": recurrent.obstacle,
    "QLinearConv": quantised.obstacle,
    "QLinearMatMul": quantised.obstacle,
    "ConvInteger": quantised.obstacle,
    "MatMulInteger": quantised.obstacle,
}


def rewrite_composites(model: ir.Model) -> None:
    """Rewrite composite operators in place; leave those that can't be."""
    dequantise_constants(model)
    _infer_shapes(model)
    _rewrite(model, _QUANTISED)
    _infer_shapes(model)
    _rewrite(model, _COMPOSITES)
    _infer_shapes(model)
    remove_identities(model)
    common_passes.RemoveUnusedNodesPass()(model)
    common_passes.NameFixPass()(model)


def why_left(node: ir.Node) -> str | None:
    """Return why an operator with weights was not rewritten; None for one that never is, or has no weights."""
    find = _OBSTACLES.get(node.op_type)
    return find(node) if find is not None and node.domain in _STANDARD_DOMAINS else None


def _rewrite(model: ir.Model, rewritings: Mapping[str, _Rewriting]) -> None:
    for node in list(model.graph):
        rewriting = rewritings.get(node.op_type)
        if rewriting is None or node.domain not in _STANDARD_DOMAINS:
            continue
        with blamed(node):
            if why_left(node) is None:
                rewriting(node)


def _infer_shapes(model: ir.Model) -> None:
    """Infer the shapes of all values between inputs and outputs anew."""
    for node in model.graph:
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = None
    common_passes.ShapeInferencePass(check_type=False, strict_mode=False)(model)
