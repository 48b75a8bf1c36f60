"""Training learns, is repeatable, and releases are complete or absent. On images made up here, in seconds."""

from __future__ import annotations

import io
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")

from rich.console import Console  # noqa: E402

from heinfer.errors import InputError  # noqa: E402
from heinfer.training.augmentation import augment  # noqa: E402
from heinfer.training.datasets.dataset import Dataset, Examples  # noqa: E402
from heinfer.training.datasets.loading import load_dataset  # noqa: E402
from heinfer.training.recipe import Augmentation, Recipe, parse_recipe, read_recipe  # noqa: E402
from heinfer.training.release import AccuracyFloorError, release_model  # noqa: E402
from heinfer.training.trainer import train, training_progress  # noqa: E402

pytestmark = pytest.mark.usefixtures("operators_registered_once")

RECIPE = """
name = "tiny"
architecture = "lenet5"
epochs = 1
batch_size = 20
learning_rate = 0.003
schedule = "{schedule}"
held_out_images = 100
seed = 4
accuracy_floor = {floor}

[augmentation]
shift_pixels = 1.0
rotation_degrees = 5.0

[data]
name = "Synthetic"
license = "CC0"
credit = "nobody"
"""


TABLE_RECIPE = """
name = "table"
architecture = "mlp"
epochs = 30
batch_size = 20
learning_rate = 0.01
schedule = "cosine"
seed = 1
accuracy_floor = 0.5

[data]
name = "Synthetic"
license = "CC0"
credit = "nobody"
label = "level"
test_fraction = 0.25
range = [0, 4000]

[data.ranges]
small = [0, 0.001]
"""


def make_data() -> Dataset:
    """Ten random patterns, each seen through noise: easy, and nothing to learn without learning the patterns."""
    generator = np.random.default_rng(11)
    patterns = np.kron(generator.random((10, 7, 7)), np.ones((4, 4)))

    def draw(count: int) -> Examples:
        labels = generator.integers(0, 10, count, dtype=np.uint8)
        noisy = patterns[labels] + generator.normal(0, 0.1, (count, 28, 28))
        return Examples((255 * noisy.clip(0, 1)).astype(np.uint8)[:, np.newaxis], labels.astype(np.int64))

    return Dataset("Synthetic", draw(1600), draw(400), classes=10)


def write_data(path: Path, test_labels: NDArray[np.int64] | None = None) -> None:
    """Write the data as an .npz archive, with other labels for the test images if they are given."""
    data = make_data()
    np.savez(
        path,
        train_images=data.train.inputs[:, 0],
        train_labels=data.train.labels,
        test_images=data.test.inputs[:, 0],
        test_labels=data.test.labels if test_labels is None else test_labels,
    )


def make_recipe(schedule: str = "one-cycle", **changes: object) -> Recipe:
    return parse_recipe({**tomllib.loads(RECIPE.format(schedule=schedule, floor=0.5)), **changes})


def release(recipe_path: Path, data_path: Path, folder: Path) -> dict[str, Any]:
    """Train and release what two files say."""
    recipe = read_recipe(recipe_path)
    return release_model(recipe, load_dataset(recipe.data, data_path), folder)


@pytest.fixture
def recipe_path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE.format(schedule="one-cycle", floor=0.5), encoding="utf-8")
    return path


@pytest.fixture
def data_path(tmp_path: Path) -> Path:
    path = tmp_path / "data.npz"
    write_data(path)
    return path


@pytest.mark.parametrize("schedule", ["one-cycle", "cosine"])
def test_train_one_epoch_learns_and_reports(schedule: str) -> None:
    console = Console(file=io.StringIO(), width=160)
    with training_progress(console) as progress:
        trained = train(make_recipe(schedule), make_data(), progress)
        (task,) = progress.tasks
    assert trained.test_accuracy > 0.9  # chance is 0.1
    assert trained.held_out_accuracy is not None
    assert task.finished
    assert task.fields["accuracy"] == f"{trained.held_out_accuracy:.4f}"


def test_train_same_seed_gives_same_weights_and_other_seed_others() -> None:
    data = make_data()
    first, again, other = (
        torch.nn.utils.parameters_to_vector(train(make_recipe(seed=seed), data).network.parameters())
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_train_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    train(make_recipe(), make_data())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_train_held_out_zero_reports_none() -> None:
    assert train(make_recipe(held_out_images=0), make_data()).held_out_accuracy is None


def test_train_unknown_architecture_is_refused() -> None:
    with pytest.raises(InputError, match="unknown architecture"):
        train(make_recipe(architecture="perceptron"), make_data())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"privacy": {"target_epsilon": 3.0}, "held_out_images": 0}, "asks for privacy"),
        ({"distillation": {"teacher": "teacher.onnx"}}, "asks for distillation"),
        ({"held_out_images": 1600}, "held_out_images = 1600 leaves none"),
    ],
)
def test_train_what_the_loop_does_not_do_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        train(make_recipe(**changes), make_data())  # type: ignore[arg-type]


def test_train_images_of_another_size_are_refused() -> None:
    examples = Examples(np.zeros((10, 3, 32, 32), np.uint8), np.arange(10))
    with pytest.raises(InputError, match=r"takes images of shape \(1, 28, 28\)"):
        train(make_recipe(held_out_images=0), Dataset("Synthetic", examples, examples, classes=10))


def test_train_table_learns_and_its_release_takes_raw_values(tmp_path: Path) -> None:
    generator = np.random.default_rng(2)
    rows = generator.uniform(size=(400, 2))
    path = tmp_path / "table.csv"
    lines = [f"{a * 4000:.3f},{b / 1000:.7f},{'high' if b > a else 'low'}" for a, b in rows]
    path.write_text("\n".join(["large,small,level", *lines]), encoding="utf-8")
    recipe = tmp_path / "table.toml"
    recipe.write_text(TABLE_RECIPE, encoding="utf-8")
    card = release(recipe, path, tmp_path / "table")
    assert card["accuracy"] > 0.9
    assert card["inputs"]["features"]["shape"] == ["batch", 2]
    with np.load(tmp_path / "table" / "samples.npz") as samples:
        assert samples["x"][:, 0].max() > 1000


def test_augment_nothing_asked_returns_the_images() -> None:
    images = torch.rand(3, 1, 28, 28)
    assert augment(images, Augmentation(), torch.Generator()) is images


def test_augment_shift_moves_a_blob_no_further_than_asked() -> None:
    images = torch.zeros(200, 1, 20, 30)
    images[:, :, 9:11, 14:16] = 1.0  # centred on row 9.5, column 14.5
    moved = augment(images, Augmentation(shift_pixels=3.0), torch.Generator().manual_seed(0))
    offsets = centres(moved) - torch.tensor([9.5, 14.5])
    assert offsets.abs().max() < 3.0 + 1e-3
    assert offsets.amax(dim=0).min() > 2.5
    assert offsets.amin(dim=0).max() < -2.5


def test_augment_rotation_turns_about_the_centre_and_keeps_distances() -> None:
    images = torch.zeros(200, 1, 20, 30)
    images[:, :, 9:11, 22:24] = 1.0  # 8 columns to the right of the centre
    turned = augment(images, Augmentation(rotation_degrees=45.0), torch.Generator().manual_seed(0))
    offsets = centres(turned) - torch.tensor([9.5, 14.5])
    angles = torch.rad2deg(torch.atan2(offsets[:, 0], offsets[:, 1]))
    # Bilinear sampling moves the centre of a blob by a fraction of a pixel.
    assert (offsets.norm(dim=1) - 8.0).abs().max() < 0.25
    assert 40.0 < angles.max() < 47.0
    assert -47.0 < angles.min() < -40.0


def test_augment_flip_mirrors_about_half_of_the_images() -> None:
    images = torch.rand(200, 1, 20, 30)
    flipped = augment(images, Augmentation(flip=True), torch.Generator().manual_seed(0))
    same = (flipped - images).abs().amax(dim=(1, 2, 3)) < 1e-4
    mirrored = (flipped - images.flip(3)).abs().amax(dim=(1, 2, 3)) < 1e-4
    assert bool((same ^ mirrored).all())
    assert 70 < int(mirrored.sum()) < 130  # four standard deviations


def centres(images: torch.Tensor) -> torch.Tensor:
    """Centre of mass of each image: row and column, shape (batch, 2)."""
    mass = images.sum(dim=(1, 2, 3))
    rows = (images.sum(dim=(1, 3)) * torch.arange(images.shape[2])).sum(dim=1) / mass
    columns = (images.sum(dim=(1, 2)) * torch.arange(images.shape[3])).sum(dim=1) / mass
    return torch.stack([rows, columns], dim=1)


def test_release_writes_a_complete_folder(recipe_path: Path, data_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "releases" / "tiny"
    card = release(recipe_path, data_path, folder)
    assert sorted(entry.name for entry in folder.iterdir()) == ["card.json", "model.onnx", "samples.npz"]
    assert json.loads((folder / "card.json").read_text(encoding="utf-8")) == card
    assert [entry.name for entry in folder.parent.iterdir()] == ["tiny"]
    data = make_data()
    with np.load(folder / "samples.npz") as samples:
        np.testing.assert_array_equal(np.rint(samples["x"] * 255).astype(np.uint8), data.test.inputs)
        np.testing.assert_array_equal(samples["y"], data.test.labels)


def test_release_replaces_an_earlier_one(recipe_path: Path, data_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "card.json").write_text("stale", encoding="utf-8")
    release(recipe_path, data_path, folder)
    assert json.loads((folder / "card.json").read_text(encoding="utf-8"))["name"] == "tiny"
    assert not list(tmp_path.glob(".tiny*"))


def test_release_folder_with_other_files_is_refused_untouched(
    recipe_path: Path, data_path: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter.txt").write_text("years of work", encoding="utf-8")
    with pytest.raises(InputError, match=r"chapter\.txt"):
        release(recipe_path, data_path, folder)
    assert (folder / "chapter.txt").read_text(encoding="utf-8") == "years of work"


def test_release_place_that_is_not_writable_is_refused(recipe_path: Path, data_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write to .*tiny\.toml"):
        release(recipe_path, data_path, recipe_path / "folder")  # the parent is a file


def test_release_failed_run_keeps_the_earlier_release(
    recipe_path: Path, data_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "card.json").write_text("earlier", encoding="utf-8")
    rename = Path.rename

    def refuse_new(self: Path, target: Path) -> Path:
        if self.name.endswith(".new"):
            raise OSError("disk full")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse_new)
    with pytest.raises(OSError, match="disk full"):
        release(recipe_path, data_path, folder)
    assert (folder / "card.json").read_text(encoding="utf-8") == "earlier"
    assert not list(tmp_path.glob(".tiny*"))


def test_release_below_the_floor_writes_nothing(recipe_path: Path, data_path: Path, tmp_path: Path) -> None:
    write_data(data_path, np.random.default_rng(0).permutation(make_data().test.labels))  # nobody reaches the floor
    folder = tmp_path / "tiny"
    with pytest.raises(AccuracyFloorError, match=r"demands 0\.5000"):
        release(recipe_path, data_path, folder)
    assert not folder.exists()
    assert not list(tmp_path.glob(".tiny*"))
