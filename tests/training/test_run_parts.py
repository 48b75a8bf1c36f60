"""The parts of a private run one by one: checkpoint, optimiser, evaluation, losses, pretraining, card."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest

pytest.importorskip("torch")

import torch
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn import functional

from heinfer.cards import CARD_KEY, find_card, privacy_line, read_card
from heinfer.errors import InputError
from heinfer.training.card import attach_card
from heinfer.training.checkpoint import Checkpoint, gather_tensors, read_checkpoint, restore_tensors, write_checkpoint
from heinfer.training.datasets.dataset import Examples
from heinfer.training.evaluation import area_under_curve, measure_privately, measure_quality
from heinfer.training.losses import DistilledRecords, make_distillation_loss
from heinfer.training.optimisers import WeightAverage, learning_rate_factors, make_optimiser
from heinfer.training.pretraining import choose_trainable, transfer_weights
from heinfer.training.privacy.mechanisms import GaussianRelease
from heinfer.training.privacy.randomness import KeyedRandomness
from heinfer.training.records import AugmentedRecords
from heinfer.training.settings import (
    Augmentation,
    Decay,
    Distillation,
    FineTuned,
    Optimiser,
    OptimiserName,
    Pretraining,
)


@pytest.mark.parametrize("name", list(OptimiserName))
def test_checkpoint_brings_network_and_optimiser_back(tmp_path, name):
    settings = Optimiser(learning_rate=0.1, name=name, momentum=0.9 if name is OptimiserName.SGD else 0.0)

    def make():
        torch.manual_seed(0)
        network = nn.Linear(3, 2)
        return network, make_optimiser(network.parameters(), settings)

    def step(network, optimiser):
        optimiser.zero_grad()
        network(torch.ones(4, 3)).square().sum().backward()
        optimiser.step()

    network, optimiser = make()
    step(network, optimiser)
    tensors, numbers = gather_tensors(network, optimiser)
    write_checkpoint(tmp_path / "c", Checkpoint({"numbers": numbers, "step": 1}, tensors))
    step(network, optimiser)
    other, other_optimiser = make()
    found = read_checkpoint(tmp_path / "c")
    restore_tensors(other, other_optimiser, found.tensors, found.state["numbers"])
    step(other, other_optimiser)
    assert torch.equal(network.weight, other.weight)
    assert (tmp_path / "c").stat().st_mode & 0o077 == 0
    with pytest.raises(InputError, match="another network"):
        restore_tensors(nn.Linear(5, 2), other_optimiser, found.tensors, found.state["numbers"])


def test_checkpoint_that_is_none_is_refused(tmp_path):
    with pytest.raises(InputError, match="no checkpoint"):
        read_checkpoint(tmp_path / "missing")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(InputError, match="is not a checkpoint"):
        read_checkpoint(tmp_path / "text")
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "tensors")
    with pytest.raises(InputError, match="is not a checkpoint"):
        read_checkpoint(tmp_path / "tensors")


def test_learning_rate_warms_up_and_decays():
    def factors(**settings):
        return [learning_rate_factors(Optimiser(learning_rate=1.0, **settings), 10)(step) for step in range(10)]

    assert factors() == [1.0] * 10
    assert factors(warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    linear = factors(decay=Decay.LINEAR)
    assert linear == pytest.approx([1 - step / 10 for step in range(10)])
    cosine = factors(decay=Decay.COSINE, warmup_steps=2)
    assert cosine[2] == 1.0
    assert np.all(np.diff(cosine[2:]) < 0)


def test_average_of_weights_follows_its_recursion():
    network = nn.Linear(1, 1, bias=False)
    network.weight.data.fill_(1.0)
    average = WeightAverage(network, 0.9)
    expected = 1.0
    for step, value in enumerate((2.0, -1.0, 5.0)):
        network.weight.data.fill_(value)
        average.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * value
    assert float(average.weights()["weight"]) == pytest.approx(expected, rel=1e-6)
    assert torch.equal(WeightAverage(network, 0.0).weights()["weight"], network.weight)


def test_area_under_curve_is_that_of_scikit_learn():
    random = np.random.default_rng(0)
    for _ in range(20):
        labels = random.integers(0, 2, 50)
        labels[:2] = 0, 1
        scores = random.integers(0, 8, 50).astype(float)  # with ties
        assert area_under_curve(scores, labels) == pytest.approx(roc_auc_score(labels, scores))


def test_private_accuracy_has_the_noise_that_is_paid():
    labels = np.zeros(1000, np.int64)
    logits = np.zeros((1000, 2), np.float32)
    logits[:400, 1] = 1.0  # 600 are right
    test = Examples(np.zeros((1000, 1), np.float32), labels)
    exact = measure_quality(logits, test)
    assert (exact.accuracy, exact.deviation) == (0.6, 0.0)
    noisy = [measure_privately(logits, test, GaussianRelease(20.0), KeyedRandomness.from_seed(s)) for s in range(300)]
    assert {quality.deviation for quality in noisy} == {0.02}
    found = np.array([quality.accuracy for quality in noisy])
    assert found.mean() == pytest.approx(0.6, abs=5 * 0.02 / np.sqrt(300))
    assert found.std() == pytest.approx(0.02, rel=5 / np.sqrt(600))
    assert noisy[0].auc is None


def test_distillation_is_the_mixture_that_is_documented():
    torch.manual_seed(0)
    logits, teacher, labels = torch.randn(5, 3), torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1])
    loss = make_distillation_loss(Distillation("teacher.onnx", temperature=3.0, weight=0.25))
    found = loss(logits, torch.cat([labels[:, None].float(), teacher], dim=1))
    p, q = torch.softmax(teacher / 3, 1), torch.softmax(logits / 3, 1)
    soft = (p * (p.log() - q.log())).sum(1)
    expected = 0.75 * functional.cross_entropy(logits, labels, reduction="none") + 0.25 * 9 * soft
    torch.testing.assert_close(found, expected)
    records = AugmentedRecords(
        Examples(np.ones((5, 2), np.float32), labels.numpy()), Augmentation(), torch.device("cpu")
    )
    _, targets = DistilledRecords(records, teacher).select(torch.tensor([3, 1]), 0)
    torch.testing.assert_close(targets, torch.cat([torch.tensor([[0.0], [1.0]]), teacher[[3, 1]]], dim=1))


def test_records_are_augmented_anew_for_every_seed_and_alike_for_the_same():
    images = np.zeros((4, 1, 8, 8), np.uint8)
    images[:, :, 3:5, 3:5] = 255
    augmentation = Augmentation(shift_pixels=2.0, copies=3)
    records = AugmentedRecords(Examples(images, np.arange(4)), augmentation, torch.device("cpu"))
    first, labels = records.select(torch.tensor([2, 0]), 1)
    assert first.shape == (2, 3, 1, 8, 8)
    assert labels.tolist() == [2, 0]
    assert torch.equal(first, records.select(torch.tensor([2, 0]), 1)[0])
    assert not torch.equal(first, records.select(torch.tensor([2, 0]), 2)[0])
    assert not torch.equal(first[0, 0], first[0, 1])


def test_pretrained_weights_move_over_but_for_a_last_layer_of_other_classes():
    def make(classes, hidden=4):
        return nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, classes))

    source, target = make(10), make(2)
    last = target[2].weight.clone()
    transfer_weights(source, target)
    assert torch.equal(source[0].weight, target[0].weight)
    assert torch.equal(last, target[2].weight)
    same = make(10)
    transfer_weights(source, same)
    assert torch.equal(source[2].weight, same[2].weight)
    with pytest.raises(InputError, match=r"0\.weight"):
        transfer_weights(make(10, hidden=5), target)


@pytest.mark.parametrize(
    ("layers", "freeze", "trained"),
    [
        (FineTuned.ALL, (), {"0", "2", "4"}),
        (FineTuned.LAST, (), {"2", "4"}),
        (FineTuned.HEAD, (), {"4"}),
        (FineTuned.ALL, ("0",), {"2", "4"}),
    ],
)
def test_fine_tuning_freezes_what_it_says(layers, freeze, trained):
    network = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    settings = Pretraining(DATA, epochs=1, batch_size=1, learning_rate=0.1, layers=layers, freeze=freeze)
    choose_trainable(network, settings)
    assert {name.split(".")[0] for name, p in network.named_parameters() if p.requires_grad} == trained


def test_freezing_what_is_not_there_or_everything_is_refused():
    network = nn.Sequential(nn.Linear(2, 2))
    for freeze, text in ((("1",), "no layer 1"), (("0",), "every layer is frozen")):
        with pytest.raises(InputError, match=text):
            choose_trainable(network, Pretraining(DATA, epochs=1, batch_size=1, learning_rate=0.1, freeze=freeze))


DATA = {"name": "x", "license": "x", "credit": "x"}


def test_card_in_a_model_is_found_and_replaces_an_earlier_one():
    model = onnx.ModelProto()
    model.metadata_props.add(key="other", value="kept")
    attach_card(model, {"epsilon": 1.0})
    attach_card(model, {"epsilon": 2.0, "delta": 1e-5, "adjacency": "add-or-remove-one", "accountant": "a"})
    assert [entry.key for entry in model.metadata_props] == ["other", CARD_KEY]
    card = find_card(model.metadata_props)
    assert card is not None
    assert privacy_line(card).startswith("epsilon = 2.000 at delta = 1e-05")
    assert privacy_line({"epsilon": None}).startswith("no differential privacy")
    model.metadata_props[1].value = "no json"
    assert find_card(model.metadata_props) is None


def test_card_in_a_folder_is_read_or_refused(tmp_path):
    assert read_card(tmp_path) is None
    (tmp_path / "card.json").write_text(json.dumps({"epsilon": 3}))
    assert read_card(tmp_path) == {"epsilon": 3}
    (tmp_path / "card.json").write_text("[1]")
    with pytest.raises(InputError, match="damaged"):
        read_card(tmp_path)
