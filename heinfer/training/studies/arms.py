"""What is trained in a study: one recipe, and for each arm what differs from it.

Adam makes an update independent of the gradient's scale, so that arms with other thresholds do not also have another
step size. Its learning rate is the same in all arms, but where an arm is about it; it was not tuned.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from heinfer.training.recipe import Recipe, parse_recipe
from heinfer.training.trials import Setup

#: Passes over the records where the time allows all of them; also what is cut last.
EPOCHS = 10
BATCH = 256
#: Of every private arm but those about epsilon.
EPSILON = 3.0
RATE = 0.002

#: Every arm is this, with changes. The network is that of Papernot et al. (2021), 26,010 weights for MNIST.
BASE: Mapping[str, Any] = MappingProxyType(
    {
        "name": "study",
        "architecture": "tanh_cnn",
        "epochs": EPOCHS,
        "batch_size": BATCH,
        "accuracy_floor": 0.0,
        "seed": 0,  # of no effect here: every run is given its own
        "data": {"name": "study", "license": "as stated for the data", "credit": "as stated for the data"},
        "optimiser": {"name": "adam", "learning_rate": RATE, "decay": "constant"},
        "privacy": {"target_epsilon": EPSILON, "delta": 1e-5, "clip_norm": 1.0},
    }
)

#: Learning rates with and without privacy, a factor of two apart.
RATES = (0.0005, 0.001, 0.002, 0.004, 0.008)
EPSILONS = (10.0, 6.0, 3.0, 1.0, 0.5, 0.1)

#: Standard deviation of the noise on the count of adaptive clipping: a twentieth of the batch (Andrew et al. 2021).
_COUNT_DEVIATION = BATCH / 20
_PRETRAINING = {
    "data": {"name": "public data", "license": "as stated for the data", "credit": "as stated for the data"},
    "epochs": 3,
    "batch_size": BATCH,
    "learning_rate": RATE,
}
_SMALL: Mapping[str, Any] = {"network.width": 8, "network.hidden": 16}
_LARGE: Mapping[str, Any] = {"network.width": 32, "network.hidden": 64}


@dataclass(frozen=True, slots=True)
class Arm:
    """One thing to train.

    Attributes:
        name: in claims and tables.
        changes: settings that differ from `BASE`, by their path in the recipe; None takes one away.
        last_clip_norm: see `heinfer.training.trials.Setup`.
        cost: time of a run, relative to that of the base, about.
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    last_clip_norm: float | None = None
    cost: float = 1.0

    @property
    def needs_public(self) -> bool:
        """Whether public data are trained on first."""
        return "pretraining" in self.changes

    @property
    def private(self) -> bool:
        """Whether there is noise."""
        return self.changes.get("privacy", True) is not None

    def recipe(self, **changes: Any) -> Recipe:
        """Return the arm's recipe.

        Args:
            changes: to top-level settings of every arm, for example `epochs`.
        """
        settings = copy.deepcopy(dict(BASE))
        for path, value in {**self.changes, **changes}.items():
            *tables, last = path.split(".")
            table = settings
            for name in tables:
                table = table.setdefault(name, {})
            if value is None:
                table.pop(last, None)
            else:
                table[last] = value
        return parse_recipe(settings, origin=f"arm {self.name!r}")

    def setup(self, epochs: int) -> Setup:
        """Return what is trained, with another number of passes."""
        return Setup(self.recipe(epochs=epochs), self.last_clip_norm)

    def describe(self) -> str:
        """Say what differs from the base."""
        parts = [f"{path} = {_show(value)}" for path, value in self.changes.items()]
        if self.last_clip_norm is not None:
            parts.append(f"clip norm falls to {self.last_clip_norm:g}")
        return "; ".join(parts) or "the base"


def at_epsilon(epsilon: float) -> str:
    """Name of the arm with the base's settings and another epsilon."""
    return "base" if epsilon == EPSILON else f"epsilon {epsilon:g}"


def at_rate(rate: float, private: bool) -> str:
    """Name of the arm with a learning rate."""
    if private:
        return "base" if rate == RATE else f"rate {rate:g}"
    return "not private" if rate == RATE else f"not private, rate {rate:g}"


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_show(inner)}' for key, inner in value.items() if key != 'data')}}}"
    return "none" if value is None else str(value)


def _layered(*noise: float) -> dict[str, Any]:
    """Clipping per layer with shares of the base's sensitivity, for the network's four layers."""
    return {
        "privacy.clipping": "per-layer",
        "privacy.clip_norms": [0.5] * 4,
        **({"privacy.layer_noise": list(noise)} if noise else {}),
    }


def _adaptive(quantile: float) -> dict[str, Any]:
    return {
        "privacy.clipping": "adaptive",
        "privacy.quantile": quantile,
        "privacy.count_deviation": _COUNT_DEVIATION,
    }


def _batch(size: int) -> dict[str, Any]:
    """Another batch; the learning rate follows its square root, as is usual for Adam."""
    return {"batch_size": size, "optimiser.learning_rate": round(RATE * math.sqrt(size / BATCH), 5)}


def _make_arms() -> Iterable[Arm]:
    yield Arm("base")
    yield Arm("steps, quiet first", {"privacy.noise_schedule": "steps:0.6,0.9,1.1"})
    yield Arm("steps, loud first", {"privacy.noise_schedule": "steps:1.1,0.9,0.6"})
    yield Arm("linear", {"privacy.noise_schedule": "linear:1.0,0.3"})
    yield Arm("exponential", {"privacy.noise_schedule": "exponential:1.0,0.3"})
    for quantile in (0.7, 0.8, 0.9):
        yield Arm(f"quantile {quantile:g}", _adaptive(quantile))
    yield Arm("C = 2", {"privacy.clip_norm": 2.0})
    yield Arm("C from 2 to 1", {"privacy.clip_norm": 2.0}, last_clip_norm=1.0)
    yield Arm("layers, equal noise", _layered())
    yield Arm("layers, quiet features", _layered(0.7, 0.7, 0.9, 1.2))
    yield Arm("layers, quiet head", _layered(1.2, 1.2, 0.9, 0.7))
    for size in (128, 1024):
        yield Arm(f"batch {size}", _batch(size))
    for rate in RATES:
        if rate != RATE:
            yield Arm(at_rate(rate, True), {"optimiser.learning_rate": rate})
        yield Arm(at_rate(rate, False), {"privacy": None, "optimiser.learning_rate": rate}, cost=0.5)
    for epsilon in EPSILONS:
        if epsilon != EPSILON:
            yield Arm(at_epsilon(epsilon), {"privacy.target_epsilon": epsilon})
    yield Arm("pretrained, epsilon 0.5", {"privacy.target_epsilon": 0.5, "pretraining": _PRETRAINING}, cost=1.2)
    yield Arm(
        "fine-tuned, epsilon 6",
        {
            "privacy.target_epsilon": 6.0,
            "pretraining": _PRETRAINING,
            "privacy.noise_schedule": "steps:1.1,0.9,0.6",
            **_adaptive(0.7),
        },
        cost=1.2,
    )
    for name, shape, cost in (("small", _SMALL, 0.6), ("large", _LARGE, 2.5)):
        yield Arm(name, shape, cost=cost)
        yield Arm(f"{name}, not private", {**shape, "privacy": None}, cost=0.5 * cost)


ARMS: Mapping[str, Arm] = MappingProxyType({arm.name: arm for arm in _make_arms()})
