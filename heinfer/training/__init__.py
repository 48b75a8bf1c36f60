"""From a recipe and labelled records to a released ONNX model with a card and samples.

The parts, in the order in which a release uses them: `recipe` (what to train, checked and immutable), `datasets`
(images and tables in several formats), `architectures` (networks by name), `trainer` (the training loop), `export` (one
static ONNX file, checked against torch) and `release` (all of it, written as one folder). `python -m heinfer.training`
runs a release from the command line. Needs the extra `train`, which brings torch.

Nothing is imported here, so that an entry point can prepare its environment before torch is loaded.
"""
