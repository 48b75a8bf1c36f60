"""The node as an inference server: several models, one queue each, and the interfaces that clients speak."""
