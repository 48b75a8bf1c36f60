"""The bundle and its plan. `heinfer.plan.execution` is imported on demand: the server needs no onnxruntime."""

from heinfer.plan.bundle import (
    NodeBundle,
    OutputTerms,
    Reference,
    ServerBundle,
    load_node,
    load_reference,
    load_server,
)
from heinfer.plan.files import read_bundle_plan, read_plan
from heinfer.plan.schema import (
    Block,
    Digests,
    ModelInfo,
    NodeStep,
    Plan,
    RingInfo,
    RoundStep,
    TensorSpec,
)

__all__ = [
    "Block",
    "Digests",
    "ModelInfo",
    "NodeBundle",
    "NodeStep",
    "OutputTerms",
    "Plan",
    "Reference",
    "RingInfo",
    "RoundStep",
    "ServerBundle",
    "TensorSpec",
    "load_node",
    "load_reference",
    "load_server",
    "read_bundle_plan",
    "read_plan",
]
