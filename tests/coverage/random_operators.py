"""All operators that are drawn, and which values each can read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tests.coverage import random_composites as composites
from tests.coverage import random_movements as movements
from tests.coverage import random_products as products
from tests.coverage.graph_sketch import Drawing, Sketch, Value

_ANY_RANK = 8


def _of(function: Callable[..., Value], operator: str, **attributes: Any) -> Callable[[Sketch, Value], Value]:
    return partial(function, operator=operator, **attributes)


#: Operators that the server has, by their names.
LINEAR: dict[str, Drawing] = {
    "Conv": Drawing(products.conv, 2, weighted=True),
    "ConvTranspose": Drawing(products.conv_transpose, 2, weighted=True),
    "Gemm": Drawing(products.gemm, 1, 1, weighted=True),
    "MatMul": Drawing(products.matmul, 1, weighted=True),
    "Einsum": Drawing(products.einsum, 1, 3, weighted=True),
    "BatchNormalization": Drawing(products.batch_normalization, 1, weighted=True, since=15),
    "Mul": Drawing(_of(products.product, "Mul"), most=_ANY_RANK, weighted=True),
    "Div": Drawing(_of(products.product, "Div"), most=_ANY_RANK, weighted=True),
    "Add": Drawing(_of(movements.addition, "Add")),
    "Sub": Drawing(_of(movements.addition, "Sub")),
    "Sum": Drawing(_of(movements.many, "Sum")),
    "Mean": Drawing(_of(movements.many, "Mean")),
    "Neg": Drawing(movements.negation),
    "AveragePool": Drawing(movements.average_pool, 2),
    "GlobalAveragePool": Drawing(movements.global_average_pool, 2),
    "ReduceMean": Drawing(_of(movements.reduction, "ReduceMean"), 1),
    "ReduceSum": Drawing(_of(movements.reduction, "ReduceSum"), 1),
    "CumSum": Drawing(movements.cumulative_sum, 1, since=14),
    "CenterCropPad": Drawing(movements.center_crop_pad, 1, since=18),
    "Concat": Drawing(movements.concat, 1),
    "DepthToSpace": Drawing(movements.depth_to_space, 3, 3),
    "Expand": Drawing(movements.expand, 0, 3),
    "Flatten": Drawing(movements.flatten, 1),
    "Gather": Drawing(movements.gather, 1, 3),
    "Identity": Drawing(movements.identity),
    "Pad": Drawing(movements.pad, 1),
    "Reshape": Drawing(movements.reshape, 1),
    "Resize": Drawing(movements.resize, 1),
    "Slice": Drawing(movements.slice_, 1),
    "SpaceToDepth": Drawing(movements.space_to_depth, 3, 3),
    "Squeeze": Drawing(movements.squeeze, 0, 3),
    "Tile": Drawing(movements.tile, 1),
    "Transpose": Drawing(movements.transpose, 1),
    "Trilu": Drawing(movements.trilu, 2, since=14),
    "Unsqueeze": Drawing(movements.unsqueeze, 0, 3),
    "Where": Drawing(movements.where, 0, since=16),
}
#: Operators that become others, and forms in which the batch is not in front.
REWRITTEN: dict[str, Drawing] = {
    "Split": Drawing(composites.split, 1),
    "LSTM": Drawing(_of(composites.recurrent, "LSTM"), 2, 2, weighted=True, since=14),
    "GRU": Drawing(_of(composites.recurrent, "GRU"), 2, 2, weighted=True, since=14),
    "RNN": Drawing(_of(composites.recurrent, "RNN"), 2, 2, weighted=True, since=14),
    "Einsum with an ellipsis": Drawing(products.einsum_ellipsis, 1, weighted=True),
    "MatMul with the sequence first": Drawing(composites.sequence_first, 2, 2, weighted=True),
    "Gemm of merged batches": Drawing(composites.merged_batch, 2, 2, weighted=True),
}
#: Quantised operators, whose result is one of the model.
QUANTISED: dict[str, Drawing] = {
    name: Drawing(_of(composites.quantised, name), rank, rank, weighted=True)
    for name, rank in (("QLinearMatMul", 2), ("MatMulInteger", 2), ("QLinearConv", 3), ("ConvInteger", 3), ("QDQ", 3))
}
#: Operators of the node.
NONLINEAR: dict[str, Drawing] = {
    "Relu": Drawing(_of(composites.nonlinear, "Relu"), most=_ANY_RANK),
    "Sigmoid": Drawing(_of(composites.nonlinear, "Sigmoid"), most=_ANY_RANK),
    "Tanh": Drawing(_of(composites.nonlinear, "Tanh"), most=_ANY_RANK),
    "Gelu": Drawing(_of(composites.nonlinear, "Gelu"), since=20),
    "Softmax": Drawing(composites.softmax, 1),
    "MaxPool": Drawing(composites.max_pool, 2),
    "LayerNormalization": Drawing(composites.layer_normalization, 1, since=17),
    "Clip": Drawing(composites.clip),
    "Mul of activations": Drawing(composites.product_of_activations),
    "MatMul of activations": Drawing(composites.attention, 2),
    "Resize by interpolation": Drawing(partial(movements.resize, modes=("linear",)), 3, 3),
    "Embedding": Drawing(composites.embedding, 1),
}
