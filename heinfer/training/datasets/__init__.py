"""Data sets for training: known sets by name, and one's own images and tables.

The parts: `dataset` (records with labels, checked and immutable), `registry` (what is known of a set by its name),
`loading` (from a recipe's table [data] and a path to a data set), and one module for each format: `archives` (.npz),
`idx`, `cifar`, `folders` (of images), `tables` (.csv) and `packaged` (sets that come with scikit-learn). No reader
unpickles anything.
"""

from heinfer.training.datasets.dataset import PIXEL_MAXIMUM, Dataset, Examples, count_duplicates, model_inputs

__all__ = ["PIXEL_MAXIMUM", "Dataset", "Examples", "count_duplicates", "model_inputs"]
