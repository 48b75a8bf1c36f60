"""ONNX in, bundle out."""

from partitioner.pipeline import Partition, partition

__all__ = ["Partition", "partition"]
