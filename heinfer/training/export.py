"""Networks as ONNX: one file, static shapes after the symbolic axis `batch`, checked against torch.

The exporter's notes on where in the Python source each node came from are removed: they name paths of the machine that
ran the training, and nobody needs them to run the model.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import nn

from heinfer.errors import HeinferError

IMAGE_INPUT, TABLE_INPUT = "image", "features"
OUTPUT_NAME = "logits"
BATCH_AXIS = "batch"
OPSET = 18

#: Largest difference between torch and onnxruntime, relative to the largest logit. Both round every sum of n terms to
#: within about n * 2**-24 (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, section 3.1); the sums on a
#: path through LeNet-5 have 635 terms in all, and 2 * 635 * 2**-24 is 7.6e-5.
RELATIVE_TOLERANCE = 1e-4


class ExportError(HeinferError):
    """The exported file does not compute what the network computes, or is not static: a bug here or in the exporter."""


def input_name(input_shape: tuple[int, ...]) -> str:
    """Name of a model's input: `image` for (channels, height, width), `features` for the rows of a table."""
    return TABLE_INPUT if len(input_shape) == 1 else IMAGE_INPUT


def export_network(network: nn.Module, input_shape: tuple[int, ...]) -> onnx.ModelProto:
    """Export a network and check the result.

    Args:
        network: takes float32 records (batch, *input_shape), gives float32 logits (batch, classes). It is left in
            evaluation mode.
        input_shape: channels, height and width of an image, or (features,).

    Returns:
        A checked model of opset 18 with the input that `input_name` says, output `logits`, and its weights inside.

    Raises:
        ExportError: the graph is not static, or onnxruntime and torch disagree.
    """
    network.eval()
    example = torch.zeros(2, *input_shape)  # a batch of 1 would be taken for a constant
    with _quiet_exporter():
        program = torch.onnx.export(
            network,
            (example,),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim(BATCH_AXIS, min=1)},),
            input_names=[input_name(input_shape)],
            output_names=[OUTPUT_NAME],
            opset_version=OPSET,
            external_data=False,
            verbose=False,
        )
    if program is None:
        raise ExportError("torch's exporter returned nothing")
    model = program.model_proto
    _strip_metadata(model)
    onnx.checker.check_model(model, full_check=True)
    _check_static(model)
    for batch in (1, 3):
        _check_agreement(network, model, (batch, *input_shape))
    return model


def run_model(model: onnx.ModelProto, inputs: NDArray[np.float32], batch: int = 1000) -> NDArray[np.float32]:
    """Run an exported model with onnxruntime, on one thread.

    Args:
        model: a model made by `export_network`.
        inputs: float32, shape (records, *input_shape).
        batch: records per run; bounds memory.

    Returns:
        float32 logits, shape (records, classes).
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    parts = [
        session.run([OUTPUT_NAME], {model.graph.input[0].name: inputs[start : start + batch]})[0]
        for start in range(0, len(inputs), batch)
    ]
    return np.concatenate(parts)


def _strip_metadata(model: onnx.ModelProto) -> None:
    graph = model.graph
    parts: list[Any] = [model, graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer]
    for part in parts:
        del part.metadata_props[:]
    for node in graph.node:
        node.doc_string = ""


def _check_static(model: onnx.ModelProto) -> None:
    """Every axis but the first of input and output is a number, the first is the symbol `batch`."""
    for value in (*model.graph.input, *model.graph.output):
        first, *others = value.type.tensor_type.shape.dim
        if first.dim_param != BATCH_AXIS or not all(axis.HasField("dim_value") for axis in others):
            shape = [axis.dim_param or axis.dim_value for axis in (first, *others)]
            raise ExportError(f"{value.name} has shape {shape}; expected the symbol {BATCH_AXIS!r}, then numbers")


def _check_agreement(network: nn.Module, model: onnx.ModelProto, shape: tuple[int, ...]) -> None:
    inputs = np.random.default_rng(0).random(shape, dtype=np.float32)
    with torch.no_grad():
        expected = network(torch.from_numpy(inputs)).numpy()
    found = run_model(model, inputs)
    difference = float(np.abs(found - expected).max())
    bound = RELATIVE_TOLERANCE * float(np.abs(expected).max())
    if not difference <= bound:  # written so that a NaN fails
        raise ExportError(
            f"onnxruntime and torch differ by {difference:.3g} at batch {shape[0]}, expected <= {bound:.3g}"
        )


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Silence what torch's exporter says about itself and its user cannot act on."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns that torchvision, which we do not use, is not installed
    try:
        with warnings.catch_warnings():
            # torch 2.13's own use of its own deprecated class
            warnings.filterwarnings("ignore", message=r".*LeafSpec.*deprecated", category=FutureWarning)
            yield
    finally:
        logger.setLevel(level)
