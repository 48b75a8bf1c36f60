"""Run one ONNX node alone under onnxruntime, its constant inputs being what they are.

What an operator does to given numbers is then right by construction, whatever its attributes and version.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from heinfer.errors import Offence, UnsupportedModelError
from heinfer.plan.execution import open_session


def run_node(node: ir.Node, feeds: Mapping[str, NDArray[Any]], left_out: Collection[int] = ()) -> NDArray[Any]:
    """Run a node with one output.

    Args:
        node: the node; its inputs are constants or in `feeds`.
        feeds: arrays by the names of the node's inputs.
        left_out: positions of optional inputs to leave out.

    Returns:
        Its result.

    Raises:
        PlanError: onnxruntime lacks the operator for this element type.
        UnsupportedModelError: onnxruntime refuses to run it.
    """
    inputs = [
        ir.Value(name=n, type=ir.TensorType(ir.DataType.from_numpy(a.dtype)), shape=ir.Shape(a.shape))
        for n, a in feeds.items()
    ]
    by_name = {v.name: v for v in inputs}
    initialisers: dict[str, ir.Value] = {}
    operands: list[ir.Value | None] = []
    for position, value in enumerate(node.inputs):
        if value is None or position in left_out:
            operands.append(None)
        elif value.name in by_name:
            operands.append(by_name[value.name])
        else:
            name = str(value.name)
            operands.append(initialisers.setdefault(name, ir.Value(name=name, const_value=value.const_value)))
    output = ir.Value(name="result", type=ir.TensorType(inputs[0].dtype or ir.DataType.FLOAT))
    copy = ir.Node(node.domain, node.op_type, operands, list(node.attributes.values()), outputs=[output])
    owner = node.graph
    assert owner is not None  # nodes of a model always have one
    opset = {"": owner.opset_imports[""]}
    graph = ir.Graph(inputs, [output], nodes=[copy], initializers=list(initialisers.values()), opset_imports=opset)
    session = open_session(ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString())
    try:
        result: NDArray[Any] = session.run(None, dict(feeds))[0]
    except Exception as error:  # onnxruntime's exceptions share no base class of their own
        offence = Offence(str(node.name), node.op_type, f"onnxruntime refuses it: {error}")
        raise UnsupportedModelError("an operator can't be partitioned:", [offence]) from error
    return result
