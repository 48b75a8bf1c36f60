"""A private run from its recipe to its release, in one folder (see `heinfer.training.runs`).

    recipe, data -> plan -> network -> [public pretraining] -> steps -> export -> quality -> card, page

A run can be killed at any time and resumed: all that it needs lies in its folder before the first private record is
read, and its ledger has every step before it is taken.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray

from heinfer.errors import InputError, IntegrityError, PrivacyBudgetError
from heinfer.training.account import EVALUATION, RunAccount
from heinfer.training.assembly import (
    Networks,
    Progress,
    make_clipping,
    make_networks,
    make_records,
    make_run,
    plan_run,
    pretrain,
    require_privacy,
    training_device,
)
from heinfer.training.card import SAMPLES_FILE, Outcome, attach_card, is_split, make_private_card
from heinfer.training.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from heinfer.training.datasets.dataset import Dataset, model_inputs, record_digests
from heinfer.training.evaluation import Quality, measure_accuracy, measure_privately, measure_quality
from heinfer.training.export import export_network, run_model
from heinfer.training.observers import Observer, Observers, StepFile, TensorBoardWriter
from heinfer.training.page import write_page
from heinfer.training.privacy.accounting import Accountant, compute_epsilon
from heinfer.training.privacy.chain import Head
from heinfer.training.privacy.ledger import TRAINING, EntryKind, Ledger
from heinfer.training.privacy.mechanisms import GaussianRelease
from heinfer.training.privacy.planning import PrivacyPlan
from heinfer.training.privacy.randomness import KeyedRandomness
from heinfer.training.private_trainer import PrivateRun, take_steps
from heinfer.training.recipe import Recipe, recipe_to_json
from heinfer.training.release import AccuracyFloorError
from heinfer.training.runs import RELEASE_FILES, RunFolder, RunRecord, default_ledger, new_run_id, sync
from heinfer.training.self_test import verify_mechanism

logger = logging.getLogger(__name__)

#: How often accuracy on public test records is measured while training.
_MEASUREMENTS = 10


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What is decided outside the recipe.

    Attributes:
        seed: makes the run repeatable and not private; None takes the operating system's generator.
        resume: go on with the run in the folder.
        ledger: file that all runs on the same records share; by default one beside the run's folder.
        allowance: epsilon that all these runs together may reach.
        checkpoint_every: steps between checkpoints.
        observers: hear of every step, beside the run's own files.
    """

    seed: int | None = None
    resume: bool = False
    ledger: Path | None = None
    allowance: float | None = None
    checkpoint_every: int = 25
    observers: tuple[Observer, ...] = ()


@dataclass(frozen=True, slots=True)
class _Session:
    """A run, with what its process needs."""

    recipe: Recipe
    record: RunRecord
    run: PrivateRun
    plan: PrivacyPlan
    networks: Networks
    randomness: KeyedRandomness
    checks: Mapping[str, str]


def train_privately(
    recipe: Recipe,
    data: Dataset,
    folder: Path,
    options: RunOptions = RunOptions(),
    public: Dataset | None = None,
    progress: Progress = lambda phase, done, total: None,
) -> dict[str, Any]:
    """Train a model with differential privacy and write its release.

    Args:
        recipe: with a table [privacy].
        data: private records, and test records.
        folder: of the run; made, or with `options.resume` gone on with.
        options: seed, ledger and the like.
        public: data of the recipe's table [pretraining].
        progress: called with a phase, what is done of it, and of how much.

    Returns:
        The card, as written to card.json.

    Raises:
        InputError: recipe, data or folder are unusable; nothing was spent.
        ParameterError: a number in the recipe does not fit the data or the network; nothing was spent.
        PrivacyBudgetError: no noise meets the target, or the ledger has no room for a single step.
        IntegrityError: the ledger was changed.
        AccuracyFloorError: the model is worse than the recipe demands; it stays in the folder `private`.
    """
    require_privacy(recipe)
    if (public is None) != (recipe.pretraining is None):
        raise InputError("public data belong to a recipe with a table [pretraining], which needs them")
    if public is not None:
        _refuse_private_records(public, data)
    place = RunFolder(folder)
    plan = None
    if options.resume:
        place.require_unfinished()
    else:
        plan = plan_run(recipe, len(data.train))  # what it refuses is refused before there is a folder
        place.create()
    with place.locked():
        if plan is None:
            session = _resume(recipe, data, place, options)
        else:
            session = _begin(recipe, data, place, options, plan, public, progress)
        return _finish(session, recipe, data, place, options, progress)


def _refuse_private_records(public: Dataset, data: Dataset) -> None:
    """Refuse public data that hold private records: training on these without privacy would cost everything."""
    known = record_digests(public.train) | record_digests(public.test)
    shared = len(record_digests(data.train) & known)
    if shared:
        raise InputError(
            f"{shared} private records are among the public data: what is trained on without privacy must hold none of "
            "them; take other public data, or take these records out"
        )


def _begin(
    recipe: Recipe,
    data: Dataset,
    place: RunFolder,
    options: RunOptions,
    plan: PrivacyPlan,
    public: Dataset | None,
    progress: Progress,
) -> _Session:
    randomness = KeyedRandomness.from_system() if options.seed is None else KeyedRandomness.from_seed(options.seed)
    networks = make_networks(recipe, data, randomness)
    if public is not None:
        pretrain(recipe, public, networks, randomness, progress)
    run = make_run(recipe, data, plan, networks, randomness)
    checks = verify_mechanism(networks.trained, recipe, data, randomness, networks.features)
    fingerprint = data.private_fingerprint()
    ledger = options.ledger or default_ledger(place.path, fingerprint)
    run_id = new_run_id(recipe.name)
    record = RunRecord(run_id, recipe_to_json(recipe), fingerprint, str(ledger.resolve()), options.allowance)
    session = _Session(recipe, record, run, plan, networks, randomness, checks)
    write_checkpoint(place.checkpoint, run.checkpoint())
    place.write(record)
    return session


def _resume(recipe: Recipe, data: Dataset, place: RunFolder, options: RunOptions) -> _Session:
    record = place.require_unfinished()
    settings = recipe_to_json(recipe)
    if record.recipe != settings:
        changed = sorted(key for key in settings if record.recipe.get(key) != settings[key])
        raise InputError(
            f"the run in {place.path} was begun with another recipe ({', '.join(changed)}); resume with it"
        )
    if record.data != data.private_fingerprint():
        raise InputError(
            f"the run in {place.path} was begun on other data ({record.data[:16]}..., these are "
            f"{data.private_fingerprint()[:16]}...); resume with the same records in the same order"
        )
    if options.ledger is not None and str(options.ledger.resolve()) != record.ledger:
        raise InputError(f"the run in {place.path} pays into {record.ledger}; leave --ledger out")
    checkpoint = read_checkpoint(place.checkpoint)
    _verify_ledger(record, checkpoint)
    if options.allowance is not None and options.allowance != record.allowance:
        record = replace(record, allowance=options.allowance)
        place.write(record)
    randomness = KeyedRandomness(bytes.fromhex(checkpoint.state["key"]), bool(checkpoint.state["seeded"]))
    wanted = KeyedRandomness.from_seed(options.seed).key if options.seed is not None else None
    if randomness.seeded != (options.seed is not None) or (wanted is not None and wanted != randomness.key):
        raise InputError(f"the run in {place.path} was begun with another seed, or without one; resume in the same way")
    plan = PrivacyPlan.from_json(checkpoint.state["plan"])
    networks = make_networks(recipe, data, randomness)
    run = make_run(recipe, data, plan, networks, randomness)
    checks = verify_mechanism(networks.trained, recipe, data, randomness, networks.features)
    run.restore(checkpoint)
    return _Session(recipe, record, run, plan, networks, randomness, checks)


def _finish(
    session: _Session, recipe: Recipe, data: Dataset, place: RunFolder, options: RunOptions, progress: Progress
) -> dict[str, Any]:
    ledger = Ledger(Path(session.record.ledger), session.record.data)
    ledger.open_run(session.record.run_id, delta=session.plan.delta, settings=_settings(session))
    account = RunAccount(ledger, session.record.run_id, session.plan, session.record.allowance)
    for number, release in enumerate(session.plan.reserve):  # before training can use up what all runs may spend
        account.charge(number, release, EVALUATION)
    observers = Observers([StepFile(place.steps), TensorBoardWriter(place.tensorboard), *options.observers])
    try:
        _train(session, ledger, account, place, data, options, observers, progress)
    finally:
        observers.close()
    progress("exporting", 0, 1)
    session.networks.trained.load_state_dict(session.run.released_weights())
    network = session.networks.whole.cpu().eval()
    model = export_network(network, data.input_shape)
    logits = run_model(model, model_inputs(data.test.inputs))
    quality = _measure(session, logits, data)
    outcome = _outcome(session, ledger, quality, options)
    card = make_private_card(recipe, data, outcome, _describe_samples(logits, recipe, data, quality))
    attach_card(model, card)
    good = card["accuracy"] >= recipe.accuracy_floor
    if good:
        _write_release(place, model, card, recipe, data)
        ledger.record(session.record.run_id, f"model {recipe.name}, {outcome.steps} steps", EntryKind.RELEASE)
    else:
        onnx.save_model(model, place.private / "model.onnx")
    place.write(replace(session.record, finished=True))
    place.checkpoint.unlink()
    if not good:
        raise AccuracyFloorError(
            f"{recipe.name} reached a test accuracy of {card['accuracy']:.4f}, its recipe demands "
            f"{recipe.accuracy_floor:.4f}; what was spent is spent, and the model is {place.private / 'model.onnx'}"
        )
    progress("exporting", 1, 1)
    return card


def _train(
    session: _Session,
    ledger: Ledger,
    account: RunAccount,
    place: RunFolder,
    data: Dataset,
    options: RunOptions,
    observers: Observers,
    progress: Progress,
) -> None:
    """Take the steps that are left."""
    run, plan = session.run, session.plan
    costs = _forecast(plan)
    every = max(1, plan.steps // _MEASUREMENTS)
    test = _PublicTest(session, data) if not plan.reserve else None

    def save() -> None:
        found = run.checkpoint()
        extra = {"ledger": asdict(ledger.head), "data": session.record.data}
        write_checkpoint(place.checkpoint, Checkpoint({**found.state, **extra}, found.tensors))

    try:
        for report in take_steps(run, account, save, options.checkpoint_every):
            observers.on_step(report, costs(run.step))
            if test is not None and (run.step % every == 0 or run.finished):
                observers.on_accuracy(run.step, test.accuracy())
            progress(f"training, epsilon {costs(run.step):.2f}", run.step, plan.steps)
    except PrivacyBudgetError as error:
        if run.step == 0:
            raise
        logger.warning("stopped after %d of %d steps: %s", run.step, plan.steps, error)


class _PublicTest:
    """Accuracy on public test records while training, from features that are computed once."""

    def __init__(self, session: _Session, data: Dataset) -> None:
        self._run = session.run
        self._network = session.networks.trained
        plain = replace(session.recipe, augmentation=type(session.recipe.augmentation)())
        self._records = make_records(plain, data.test, session.networks)

    def accuracy(self) -> float:
        """Of the weights that would be released now."""
        weights = {name: tensor.clone() for name, tensor in self._network.state_dict().items()}
        self._network.load_state_dict(self._run.released_weights())
        self._network.eval()
        accuracy = measure_accuracy(self._network, self._records)
        self._network.load_state_dict(weights)
        self._network.train()
        return accuracy


def _forecast(plan: PrivacyPlan) -> Callable[[int], float]:
    """Return steps -> epsilon for display: exact at twenty places, linear in between."""
    places = np.unique(np.linspace(0, plan.steps, 21).astype(int))
    found = [compute_epsilon(plan.first(int(steps)), plan.delta) for steps in places]
    return lambda steps: float(np.interp(steps, places, found))


def _measure(session: _Session, logits: NDArray[np.float32], data: Dataset) -> Quality:
    for release in session.plan.reserve:
        assert isinstance(release, GaussianRelease)
        return measure_privately(logits, data.test, release, session.randomness)
    return measure_quality(logits, data.test)


def _outcome(session: _Session, ledger: Ledger, quality: Quality, options: RunOptions) -> Outcome:
    """Sum up a run from what its ledger says, which must be what was done.

    Raises:
        IntegrityError: the ledger has other steps than those that were taken.
    """
    plan, taken = session.plan, session.run.step
    paid = ledger.spent(session.record.run_id)
    steps = sum(mechanism.count for mechanism in ledger.spent(session.record.run_id, TRAINING))
    epsilon, rdp = (compute_epsilon(paid, plan.delta, accountant) for accountant in (Accountant.PLD, Accountant.RDP))
    if steps != taken or epsilon > plan.epsilon_pld * (1 + 1e-9):
        raise IntegrityError(
            f"{ledger.path} has {steps} steps of run {session.record.run_id} at epsilon {epsilon:.4f}, but {taken} "
            f"were taken of a plan that costs {plan.epsilon_pld:.4f}: it was changed, and the model is not released"
        )
    first, last = make_clipping(require_privacy(session.recipe)).sensitivity, session.run.sensitivity
    accounting = f"epsilon {epsilon:.4f} by PLD, {rdp:.4f} by RDP, for {taken} steps in the ledger"
    return Outcome(
        plan=plan,
        steps=taken,
        epsilon_pld=epsilon,
        epsilon_rdp=rdp,
        clip_norms=(first,) if first == last else (first, last),
        seed=options.seed,
        quality=quality,
        checks={**session.checks, "accounting": accounting},
    )


def _verify_ledger(record: RunRecord, checkpoint: Checkpoint) -> None:
    """Check that the ledger still has what it had when the checkpoint was written.

    Raises:
        IntegrityError: it was cut, replaced or taken away.
    """
    known = checkpoint.state.get("ledger")
    if known is not None:
        Ledger(Path(record.ledger), record.data).verify(Head(**known))


def _write_release(
    place: RunFolder, model: onnx.ModelProto, card: Mapping[str, Any], recipe: Recipe, data: Dataset
) -> None:
    """Write model, card, samples and page, and bring them to the disk."""
    onnx.save_model(model, place.path / "model.onnx")
    (place.path / "card.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    count = recipe.output.samples
    inputs, labels = model_inputs(data.test.inputs[:count]), data.test.labels[:count]
    if card["samples"] is not None:  # private test records are not handed on
        np.savez_compressed(place.path / SAMPLES_FILE, x=inputs, y=labels)
    write_page(place.path / "report.html", card, place.steps)
    for name in RELEASE_FILES:
        if (place.path / name).exists():
            sync(place.path / name)
    sync(place.path)


def _describe_samples(
    logits: NDArray[np.float32], recipe: Recipe, data: Dataset, quality: Quality
) -> dict[str, Any] | None:
    """What the card says of samples.npz; None where test records are private."""
    count = min(recipe.output.samples, len(data.test))
    if quality.deviation or is_split(recipe) or not count:
        return None
    correct = logits[:count].argmax(axis=1) == data.test.labels[:count]
    return {"file": SAMPLES_FILE, "images": count, "accuracy": float(correct.mean())}


def _settings(session: _Session) -> dict[str, Any]:
    """What pins a run down in the ledger; the key by its hash."""
    return {
        "plan": session.plan.to_json(),
        "key": sha256(session.randomness.key).hexdigest(),
        "seeded": session.randomness.seeded,
        "device": training_device().type,  # another one rounds differently: the same noise on other sums
        "torch": torch.__version__,
        "teacher": _teacher_digest(session.recipe),
        "recipe": session.record.recipe,
    }


def _teacher_digest(recipe: Recipe) -> str | None:
    return None if recipe.distillation is None else sha256(Path(recipe.distillation.teacher).read_bytes()).hexdigest()
