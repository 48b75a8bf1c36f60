"""The messages of the Open Inference Protocol."""
