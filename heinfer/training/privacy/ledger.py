"""What was taken from one set of private data, in a file that every run on these data adds to.

    ledger = Ledger(path, dataset.fingerprint)
    ledger.open_run("run-1", delta=1e-5, settings={**plan.to_json(), "key": key_hash})
    ledger.spend("run-1", step, plan.mechanism(step))      # on the disk when it returns; then take the step
    ledger.spent()                                         # by all runs

The file is a hash chain (see `chain`): an edit, a missing line or a different order shows. That guards against
accidents and quiet edits; whoever may write both files of the chain can forge both, unless a `head` was kept elsewhere.

Entries are on the disk before what they pay for is taken, and nothing removes one: going back to an earlier checkpoint
refunds nothing. A step that the same run takes again with the same mechanism counts once, because a run that resumes
with the same key draws the same sample and the same noise on the same weights and so releases nothing new. This holds
only if the settings given to `open_run` pin down the key, for example by its hash; other settings are refused.

A line that a crash left incomplete was to pay for something that was not taken, since `spend` did not return.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from heinfer.errors import InputError, IntegrityError, ParameterError
from heinfer.training.privacy import mechanisms
from heinfer.training.privacy.chain import Chain, Head
from heinfer.training.privacy.mechanisms import Mechanism

TRAINING = "training"


class EntryKind(StrEnum):
    """What an entry says."""

    OPEN = "open"  #: a run begins, or goes on
    STEP = "step"  #: a mechanism is paid for
    RELEASE = "release"  #: something left the run: a model, a figure
    NOTE = "note"  #: anything else worth keeping


@dataclass(frozen=True, slots=True)
class Run:
    """How a run was opened.

    Attributes:
        delta: at which its epsilon is meant.
        settings: what must not change when it is resumed, as JSON values.
    """

    delta: float
    settings: Mapping[str, Any]


class Ledger:
    """The ledger of one set of data.

    Args:
        path: the file; made by the first entry.
        fingerprint: of the data; None to read a ledger of any data.

    Every method but the properties reads first what other processes have added, and raises IntegrityError if the chain
    is broken, or InputError if the ledger belongs to other data.
    """

    def __init__(self, path: Path, fingerprint: str | None = None) -> None:
        self.path = path
        self._expected = fingerprint
        self._forget()

    def _forget(self) -> None:
        self._chain = Chain(self.path, self._take)
        self._fingerprint = self._expected
        self._runs: dict[str, Run] = {}
        self._paid: dict[tuple[str, str, int], Mechanism] = {}

    @property
    def fingerprint(self) -> str | None:
        """Of the data; None if it was not given and nothing was read yet."""
        return self._fingerprint

    @property
    def head(self) -> Head:
        """Where the ledger ended when it was last read or written: keep it in the checkpoint, for `verify`."""
        return self._chain.head

    @property
    def torn_line(self) -> int | None:
        """Number of a last line that a crash left incomplete; the next entry will name it."""
        return self._chain.torn_line

    def open_run(self, run_id: str, *, delta: float, settings: Mapping[str, Any]) -> None:
        """Begin a run, or go on with it.

        Args:
            run_id: name of the run.
            delta: at which its epsilon is meant.
            settings: JSON values that fix the run: plan, sampler, clip norm, hash of the key, and so on.

        Raises:
            ParameterError: a run of this name has other settings, or a value is out of range.
        """
        if not run_id or not (math.isfinite(delta) and 0 < delta < 1):
            raise ParameterError(f"expected a name and a delta in (0, 1), found {run_id!r} and {delta!r}")
        if self._expected is None:
            raise ParameterError("a ledger that is written to needs the fingerprint of its data")
        content = {"delta": delta, "settings": _plain(settings)}
        with self._writing() as append:
            before = self._runs.get(run_id)
            if before is not None and (before.delta, before.settings) != (delta, content["settings"]):
                raise ParameterError(
                    f"run {run_id} was opened with other settings ({_differences(before, delta, settings)}): resume it "
                    "with its own, or give the new run another name"
                )
            append(self._entry(EntryKind.OPEN, run_id, **content))

    def spend(
        self,
        run_id: str,
        step: int,
        mechanism: Mechanism,
        purpose: str = TRAINING,
        allow: Callable[[tuple[Mechanism, ...]], None] = lambda others: None,
    ) -> bool:
        """Pay for a mechanism, before it is applied.

        Args:
            run_id: an open run.
            step: number of the step, or of the release, within run and purpose.
            mechanism: what will be taken.
            purpose: what for.
            allow: raises where it must not be added; called with what other runs have paid for until now. No other
                process adds anything between this call and the entry.

        Returns:
            True if it was added; False if this very step was paid for before and is free to be taken again.

        Raises:
            IntegrityError: the step was paid for with another mechanism; nothing is added.
            Exception: what `allow` raises; nothing is added.
            ParameterError: the run is not open, or the step is no number.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ParameterError(f"expected the number of a step, found {step!r}")
        with self._writing() as append:
            self._require(run_id)
            before = self._paid.get((run_id, purpose, step))
            if before == mechanism:
                return False
            if before is not None:
                raise IntegrityError(
                    f"step {step} of run {run_id} ({purpose}) was paid for as {before}; {mechanism} is another "
                    "release: resume with the settings of the run, or start a new one"
                )
            allow(self._spent_by(lambda run: run != run_id))
            content = {"step": step, "purpose": purpose, "mechanism": mechanisms.to_json(mechanism)}
            append(self._entry(EntryKind.STEP, run_id, **content))
            return True

    def record(self, run_id: str, text: str, kind: EntryKind = EntryKind.NOTE) -> None:
        """Write down what costs nothing, such as the release of a model that was paid for step by step.

        Raises:
            ParameterError: the run is not open, or the kind is one that has a method of its own.
        """
        if kind not in (EntryKind.NOTE, EntryKind.RELEASE):
            raise ParameterError(f"expected a note or a release, found {kind}")
        with self._writing() as append:
            self._require(run_id)
            append(self._entry(kind, run_id, text=text))

    def runs(self) -> dict[str, Run]:
        """Return all runs by name, in the order in which they began."""
        self._read()
        return dict(self._runs)

    def spent(self, run_id: str | None = None, purpose: str | None = None) -> tuple[Mechanism, ...]:
        """Return what was paid for, each step once, equal mechanisms merged.

        Args:
            run_id: only of this run.
            purpose: only for this purpose.
        """
        self._read()
        return mechanisms.merge(
            mechanism
            for (run, what_for, _), mechanism in self._paid.items()
            if run_id in (None, run) and purpose in (None, what_for)
        )

    def _spent_by(self, chosen: Callable[[str], bool]) -> tuple[Mechanism, ...]:
        """Return what the chosen runs have paid for, as far as was read."""
        return mechanisms.merge(mechanism for (run, _, _), mechanism in self._paid.items() if chosen(run))

    def purposes(self, run_id: str) -> tuple[str, ...]:
        """Return what a run has paid for."""
        self._read()
        return tuple(dict.fromkeys(purpose for run, purpose, _ in self._paid if run == run_id))

    def verify(self, known: Head | None = None) -> Head:
        """Check the whole chain again, from its first line.

        Args:
            known: an earlier end of this ledger, from a checkpoint for example, that must be part of it.

        Returns:
            Its end.

        Raises:
            IntegrityError: it is broken; the message names the first bad line.
        """
        self._forget()
        self._read()
        if known is not None and not self._chain.contains(known):
            raise IntegrityError(f"{self.path} no longer has entry {known.entries} as it was: it was cut or replaced")
        return self.head

    def _read(self) -> None:
        with self._consistent():
            self._chain.read()

    @contextmanager
    def _writing(self) -> Iterator[Callable[[Mapping[str, Any]], None]]:
        with self._consistent(), self._chain.writing() as append:
            yield append

    @contextmanager
    def _consistent(self) -> Iterator[None]:
        """Forget a file that turned out to be no good, so that the next call reads it from the start."""
        try:
            yield
        except (IntegrityError, InputError):
            self._forget()
            raise

    def _require(self, run_id: str) -> None:
        if run_id not in self._runs:
            raise ParameterError(f"run {run_id} is not open in {self.path}: call open_run first")

    def _entry(self, kind: EntryKind, run_id: str, **content: Any) -> dict[str, Any]:
        return {
            "kind": kind.value,
            "run": run_id,
            **content,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "data": self._fingerprint,
            "versions": _versions(),
        }

    def _take(self, line: int, entry: Mapping[str, Any]) -> None:
        """Count one entry of a sound chain."""
        try:
            self._count(entry)
        except (KeyError, TypeError, ValueError, ParameterError) as error:
            raise IntegrityError(f"line {line} of {self.path} is no entry of a ledger: {error}") from error

    def _count(self, entry: Mapping[str, Any]) -> None:
        kind, run, data = EntryKind(entry["kind"]), str(entry["run"]), str(entry["data"])
        if self._fingerprint is None:
            self._fingerprint = data
        if data != self._fingerprint:
            raise InputError(
                f"{self.path} is the ledger of the data {data[:16]}..., these are {self._fingerprint[:16]}...: every "
                "set of data has its own"
            )
        if kind is EntryKind.OPEN:
            self._runs[run] = Run(float(entry["delta"]), dict(entry["settings"]))
        elif kind is EntryKind.STEP:
            key = (run, str(entry["purpose"]), int(entry["step"]))
            mechanism = mechanisms.from_json(entry["mechanism"])
            if self._paid.setdefault(key, mechanism) != mechanism:
                raise ValueError(f"step {key[2]} of run {run} was paid for as {self._paid[key]}")


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as they come back from a file."""
    try:
        return dict(json.loads(json.dumps(settings, allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise ParameterError(f"the settings of a run must be JSON values: {error}") from error


def _differences(before: Run, delta: float, settings: Mapping[str, Any]) -> str:
    old, new = {"delta": before.delta, **before.settings}, {"delta": delta, **_plain(settings)}
    return ", ".join(sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key)))


@cache
def _versions() -> dict[str, str]:
    found = {}
    for name in ("heinfer", "dp-accounting"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found
