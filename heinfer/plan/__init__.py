"""The bundle and its plan. `heinfer.plan.execution` is imported on demand: the server needs no onnxruntime."""

from heinfer.plan.bundle import (
    NodeBundle,
    OutputTerms,
    Reference,
    ServerBundle,
    load_node,
    load_reference,
    load_server,
    read_bundle_plan,
)
from heinfer.plan.deep import DeepBlock
from heinfer.plan.files import read_plan
from heinfer.plan.hints import BlockHints, NodeHints, batch_polynomials, block_ring, public_polynomials
from heinfer.plan.schema import (
    Block,
    DeepStep,
    Digests,
    ModelInfo,
    NodeStep,
    Plan,
    PreparedInfo,
    RingInfo,
    RoundStep,
)
from heinfer.plan.tensors import TensorSpec

__all__ = [
    "Block",
    "BlockHints",
    "DeepBlock",
    "DeepStep",
    "Digests",
    "ModelInfo",
    "NodeBundle",
    "NodeHints",
    "NodeStep",
    "OutputTerms",
    "Plan",
    "PreparedInfo",
    "Reference",
    "RingInfo",
    "RoundStep",
    "ServerBundle",
    "TensorSpec",
    "batch_polynomials",
    "block_ring",
    "load_node",
    "load_reference",
    "load_server",
    "public_polynomials",
    "read_bundle_plan",
    "read_plan",
]
