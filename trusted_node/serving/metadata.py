"""What the node says of its models, in the words of the Open Inference Protocol v2 and of Triton.

    model_metadata       {"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 1, 28, 28]}], ...}
    model_configuration  {"max_batch_size": 65536, "input": [{"name": "x", "data_type": "TYPE_FP32",
                          "dims": [1, 28, 28]}], ...}

The first dimension is the samples, as many as one likes: -1 in metadata, left out of a configuration.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from heinfer.plan import TensorSpec
from trusted_node.serving.datatypes import datatype_of
from trusted_node.serving.interface import VERSION, ServedModel

#: The name of the server, and of its package.
SERVER_NAME = "heinfer"
PLATFORM = "heinfer_plan"
#: Extensions of the protocol that the node offers, as Triton names them.
EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics")


def server_metadata() -> dict[str, Any]:
    """Say who this is."""
    return {"name": SERVER_NAME, "version": version(SERVER_NAME), "extensions": list(EXTENSIONS)}


def model_metadata(model: ServedModel) -> dict[str, Any]:
    """Say what goes into a model and what comes out."""
    return {
        "name": model.name,
        "versions": [VERSION],
        "platform": PLATFORM,
        "inputs": [_tensor(t) for t in model.plan.inputs],
        "outputs": [_tensor(t) for t in model.plan.outputs],
    }


def model_configuration(model: ServedModel) -> dict[str, Any]:
    """Say the same as a Triton model configuration, as far as one is true of a node."""
    return {
        "name": model.name,
        "platform": PLATFORM,
        "backend": SERVER_NAME,
        "max_batch_size": model.max_samples,
        "input": [_configured(t) for t in model.plan.inputs],
        "output": [_configured(t) for t in model.plan.outputs],
        "dynamic_batching": {},
    }


def _tensor(tensor: TensorSpec) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": datatype_of(tensor.dtype), "shape": [-1, *tensor.shape]}


def _configured(tensor: TensorSpec) -> dict[str, Any]:
    return {"name": tensor.name, "data_type": f"TYPE_{datatype_of(tensor.dtype)}", "dims": list(tensor.shape)}
