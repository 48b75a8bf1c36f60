"""The nine architectures in onnx.backend.test's light models, at 224x224, with weights as before training.

The files of the installed onnx package hold the graphs alone: every tensor of weights is a ConstantOfShape. Here these
become initialisers with seeded values: He-normal weights, small biases, and BatchNormalization with variances in
[0.5, 2], so that activations neither vanish nor explode as they do with constants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

Floats = NDArray[np.float64]
FOLDER: Final = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
NAMES: Final = (
    "bvlc_alexnet",
    "densenet121",
    "inception_v1",
    "inception_v2",
    "resnet50",
    "shufflenet",
    "squeezenet",
    "vgg19",
    "zfnet512",
)
#: Deviation of biases, shifts and means, and of scales around 1.
_SMALL: Final = 0.1


def light_model(name: str, seed: int = 0) -> onnx.ModelProto:
    """Build a model with weights.

    Args:
        name: one of `NAMES`.
        seed: of the weights.

    Returns:
        The model; its one input that is no initialiser has shape (1, 3, 224, 224).
    """
    model = onnx.load(FOLDER / f"light_{name}.onnx")
    graph = model.graph
    shapes = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
    constants = {n.output[0]: tuple(shapes[n.input[0]].tolist()) for n in graph.node if n.op_type == "ConstantOfShape"}
    replaced = {n.input[0] for n in graph.node if n.op_type == "ConstantOfShape"}
    roles = _roles(graph)
    generator = np.random.default_rng(seed)
    made = [
        numpy_helper.from_array(_DRAWN[roles[value]](generator, shape).astype(np.float32), value)
        for value, shape in constants.items()
    ]
    _keep(graph.node, [n for n in graph.node if n.op_type != "ConstantOfShape"])
    _keep(graph.input, [i for i in graph.input if i.name not in replaced])
    _keep(graph.initializer, [i for i in graph.initializer if i.name not in replaced] + made)
    for value, shape in constants.items():  # below version 4 of the format an initialiser is an input as well
        graph.input.append(onnx.helper.make_tensor_value_info(value, onnx.TensorProto.FLOAT, shape))
    return model


def image(seed: int = 1, samples: int = 1) -> NDArray[np.float32]:
    """Draw normalised images, shape (samples, 3, 224, 224)."""
    return np.random.default_rng(seed).normal(size=(samples, 3, 224, 224)).astype(np.float32)


def with_logits(model: onnx.ModelProto) -> str:
    """Make what enters the final Softmax a result of the model, in place; return its name.

    Models that end without a Softmax have that result already.
    """
    last = model.graph.node[-1]
    if last.op_type != "Softmax":
        return str(model.graph.output[0].name)
    name = str(last.input[0])
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    model.graph.output[-1].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    inferred = onnx.shape_inference.infer_shapes(model)
    shape = next(v.type for v in inferred.graph.output if v.name == name)
    model.graph.output[-1].type.CopyFrom(shape)
    return name


def _roles(graph: onnx.GraphProto) -> Mapping[str, str]:
    """Return what each operand of an operator is to it, even where Unsqueeze or Reshape brings it into shape."""
    roles: dict[str, str] = {}
    for node in reversed(graph.node):
        if node.op_type in ("Unsqueeze", "Reshape") and node.output[0] in roles:
            roles[node.input[0]] = roles[node.output[0]]
        elif node.op_type == "Gemm":
            by_rows = any(a.name == "transB" and a.i for a in node.attribute)
            roles.update(zip(node.input[1:], ("rows" if by_rows else "columns", "bias"), strict=False))
        else:
            roles.update(zip(node.input[1:], _OPERANDS.get(node.op_type, ()), strict=False))
    return roles


_OPERANDS: Final[Mapping[str, tuple[str, ...]]] = {
    "Conv": ("kernels", "bias"),
    "BatchNormalization": ("scale", "bias", "bias", "variance"),
    "Mul": ("scale",),
    "Add": ("bias",),
}


def _he_normal(generator: np.random.Generator, shape: tuple[int, ...], inputs: int) -> Floats:
    """Weights before a ReLU; He et al., "Delving deep into rectifiers", ICCV 2015, equation 10."""
    return generator.normal(scale=np.sqrt(2 / inputs), size=shape)


_DRAWN: Final[Mapping[str, Callable[[np.random.Generator, tuple[int, ...]], Floats]]] = {
    "kernels": lambda generator, shape: _he_normal(generator, shape, prod(shape[1:])),
    "rows": lambda generator, shape: _he_normal(generator, shape, shape[-1]),
    "columns": lambda generator, shape: _he_normal(generator, shape, shape[-2]),
    "bias": lambda generator, shape: generator.normal(scale=_SMALL, size=shape),
    "scale": lambda generator, shape: generator.normal(1, _SMALL, shape),
    "variance": lambda generator, shape: generator.uniform(0.5, 2, shape),
}


def _keep(field: object, items: list[object]) -> None:
    """Replace the contents of a repeated field."""
    kept = list(items)
    del field[:]  # type: ignore[attr-defined]
    field.extend(kept)  # type: ignore[attr-defined]
