"""Data sets that cannot be trained on are refused with a message that says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from heinfer.errors import InputError
from heinfer.training.datasets.dataset import Dataset, Examples, count_duplicates, model_inputs
from heinfer.training.datasets.loading import load_dataset
from heinfer.training.datasets.splitting import split_examples
from heinfer.training.recipe import DataSource

CARD = Path(__file__).parents[2] / "models" / "released" / "mnist_lenet5" / "card.json"


def make_images(count: int = 6, classes: int = 3) -> Examples:
    pixels = np.random.default_rng(count).integers(0, 256, (count, 1, 8, 8), dtype=np.uint8)
    return Examples(pixels, np.arange(count) % classes)


def make_rows(rows: object, labels: object) -> Examples:
    return Examples(np.array(rows, np.float32), np.array(labels, np.int64))


def test_dataset_complete_has_shape_and_names() -> None:
    data = Dataset("set", make_images(), make_images(4), classes=3, class_names=("a", "b", "c"))
    assert data.input_shape == (1, 8, 8)
    assert not data.is_table
    assert data.class_name(2) == "c"
    assert len(data.train) == 6


@pytest.mark.parametrize(
    ("inputs", "labels", "message"),
    [
        (np.zeros((4, 8, 8), np.uint8), np.zeros(4, np.int64), "inputs: expected images"),
        (np.zeros((4, 1, 8, 8), np.float32), np.zeros(4, np.int64), "inputs: expected images"),
        (np.zeros((4, 3)), np.zeros(4, np.int64), "inputs: expected images"),
        (np.zeros((0, 3), np.float32), np.zeros(0, np.int64), "at least one record"),
        (np.zeros((4, 3), np.float32), np.zeros(4, np.uint8), "labels: expected int64"),
        (np.zeros((4, 3), np.float32), np.zeros(5, np.int64), r"labels: .*\(4,\)"),
    ],
)
def test_examples_of_other_arrays_are_refused(inputs: NDArray[Any], labels: NDArray[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Examples(inputs, labels)


@pytest.mark.parametrize(
    ("train", "settings", "message"),
    [
        (make_images(), {"classes": 1}, "at least 2 classes"),
        (make_images(), {"classes": 2}, r"train part: expected labels from 0 to 1, found 2 at record 2 \(and 1 more\)"),
        (make_images(), {"classes": 4, "class_names": tuple("abcd")}, "no training record of class d"),
        (make_images(), {"classes": 3, "class_names": ("a", "b")}, "expected 3 class_names, found 2"),
        (Examples(np.zeros((3, 1, 9, 8), np.uint8), np.arange(3)), {"classes": 3}, "expected one shape"),
        (Examples(np.zeros((3, 1, 8, 8), np.uint8), np.array([0, -1, 1])), {"classes": 2}, "found -1 at record 1"),
    ],
)
def test_dataset_unfit_for_training_is_refused(train: Examples, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Dataset("set", train, make_images(), **settings)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_dataset_value_that_is_not_finite_is_found(value: float) -> None:
    good = make_rows([[0, 1], [2, 3], [4, 5]], [0, 1, 0])
    bad = make_rows([[0, 1], [2, value], [value, 5]], [0, 1, 0])
    with pytest.raises(InputError, match=r"test part: -?(nan|inf) at record 1, feature 1 \(height\)"):
        Dataset("set", good, bad, classes=2, feature_names=("width", "height"))


def test_count_duplicates_counts_exact_repetitions_only() -> None:
    rows = [[1, 2], [1, 2], [1, 2], [2, 1], [1, 2], [1, 2.0000002]]
    assert count_duplicates(make_rows(rows, [0, 0, 0, 0, 1, 0])) == 2
    images = make_images(5)
    assert count_duplicates(images) == 0
    assert count_duplicates(images.select(np.array([0, 1, 0, 1, 1]))) == 3


def test_fingerprint_of_mnist_is_that_of_the_released_card(shared: Path) -> None:
    source = DataSource(name="MNIST", license="CC BY-SA 3.0", credit="see there", set="mnist")
    data = load_dataset(source, shared / "data" / "mnist.npz")
    assert data.fingerprint() == json.loads(CARD.read_text(encoding="utf-8"))["data_fingerprint"]
    assert (len(data.train), len(data.test), data.classes) == (60_000, 10_000, 10)
    assert count_duplicates(data.train) == 0


def test_fingerprints_follow_their_parts() -> None:
    data = Dataset("set", make_images(), make_images(4), classes=3)
    renamed = Dataset("other", make_images(), make_images(4), classes=3)
    other_test = Dataset("set", make_images(), make_images(5), classes=3)
    other_train = Dataset("set", make_images().select(np.arange(6)[::-1]), make_images(4), classes=3)
    assert data.fingerprint() == renamed.fingerprint()
    assert len({data.fingerprint(), other_test.fingerprint(), other_train.fingerprint()}) == 3
    assert data.private_fingerprint() == other_test.private_fingerprint() != other_train.private_fingerprint()


def test_model_inputs_recovers_every_pixel_value_exactly() -> None:
    pixels = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    values = model_inputs(pixels)
    assert values.dtype == np.float32
    assert (values.min(), values.max()) == (0.0, 1.0)
    np.testing.assert_array_equal(np.rint(values * 255).astype(np.uint8), pixels)


def test_split_examples_takes_a_fraction_of_every_class_and_no_record_twice() -> None:
    labels = np.repeat([0, 1, 2], [50, 30, 20])
    examples = Examples(np.arange(100, dtype=np.float32)[:, np.newaxis], labels)
    train, test = split_examples(examples, 0.2, seed=1)
    assert np.bincount(test.labels).tolist() == [10, 6, 4]
    assert sorted([*train.inputs[:, 0], *test.inputs[:, 0]]) == list(range(100))
    assert np.all(np.diff(train.inputs[:, 0]) > 0)
    again, other = (split_examples(examples, 0.2, seed)[1].inputs for seed in (1, 2))
    assert np.array_equal(again, test.inputs)
    assert not np.array_equal(other, test.inputs)


def test_split_examples_that_leaves_a_part_empty_is_refused() -> None:
    with pytest.raises(InputError, match="leaves one part empty"):
        split_examples(make_rows([[1], [2]], [0, 1]), 0.1, seed=0)
