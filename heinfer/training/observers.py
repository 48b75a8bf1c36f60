"""What the operator sees while a run goes on: a progress bar, TensorBoard, a file of steps.

Loss, norms and the fraction within the threshold are private values and stay in the run's folder `private/`. The rest
of a step (noise, learning rate, epsilon) is known in advance to anybody who has the recipe.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from heinfer.training.private_trainer import StepReport


class Observer(Protocol):
    """Hears of every step and every measured accuracy."""

    def on_step(self, report: StepReport, epsilon: float) -> None:
        """Take note of a step; epsilon is what was spent with it."""

    def on_accuracy(self, step: int, accuracy: float) -> None:
        """Take note of an accuracy on public records after `step` steps."""

    def close(self) -> None:
        """Write what is left to write."""


class StepFile:
    """A line of JSON for every step.

    Args:
        path: appended to, since a resumed run goes on in it.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def on_step(self, report: StepReport, epsilon: float) -> None:
        """See `Observer.on_step`."""
        self._write({**asdict(report), "epsilon": epsilon})

    def on_accuracy(self, step: int, accuracy: float) -> None:
        """See `Observer.on_accuracy`."""
        self._write({"step": step, "accuracy": accuracy})

    def close(self) -> None:
        """See `Observer.close`."""
        self._file.close()

    def _write(self, content: dict[str, Any]) -> None:
        self._file.write(json.dumps(content) + "\n")
        self._file.flush()


class TensorBoardWriter:
    """Scalars for TensorBoard: those under `private` are private values.

    Args:
        folder: of its files.
    """

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages that tensorboard loads
            from torch.utils.tensorboard import SummaryWriter

            self._writer: Any = SummaryWriter(str(folder), flush_secs=10)

    def on_step(self, report: StepReport, epsilon: float) -> None:
        """See `Observer.on_step`."""
        scalars = {
            "public/epsilon": epsilon,
            "public/noise_multiplier": report.noise_multiplier,
            "public/clip_norm": report.clip_norm,
            "public/learning_rate": report.learning_rate,
            "private/loss": report.loss,
            "private/fraction_clipped": 1 - report.within,
            "private/gradient_norm": report.norm,
            "private/records": report.records,
        }
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, report.step)

    def on_accuracy(self, step: int, accuracy: float) -> None:
        """See `Observer.on_accuracy`."""
        self._writer.add_scalar("public/test_accuracy", accuracy, step)

    def close(self) -> None:
        """See `Observer.close`."""
        self._writer.close()


class Observers:
    """Several observers as one."""

    def __init__(self, parts: Sequence[Observer]) -> None:
        self._parts = tuple(parts)

    def on_step(self, report: StepReport, epsilon: float) -> None:
        """See `Observer.on_step`."""
        for part in self._parts:
            part.on_step(report, epsilon)

    def on_accuracy(self, step: int, accuracy: float) -> None:
        """See `Observer.on_accuracy`."""
        for part in self._parts:
            part.on_accuracy(step, accuracy)

    def close(self) -> None:
        """See `Observer.close`."""
        for part in self._parts:
            part.close()
