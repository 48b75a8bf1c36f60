"""ONNX in, bundle out."""

from partitioner.pipeline import Partition, partition
from partitioner.rotation import rotate

__all__ = ["Partition", "partition", "rotate"]
