"""Which mode a query runs in.

Prepared mode needs hints for every block, and takes one sample as well as many: about 1 ms of one core for a LeNet-5
sample, where standard mode takes 1.8 ms a sample in full batches of N and as long for one as for all of them. Where a
bundle has hints for batches, full batches cost a fraction of either. `auto` takes what the forecast says is fastest,
preparation included (`heinfer.plan.forecast`), on this machine where its constants were measured.
"""

from __future__ import annotations

import enum
import logging
import os
from functools import cache, lru_cache
from typing import Final

from heinfer.errors import InputError
from heinfer.plan import Plan
from heinfer.plan.forecast import forecast
from heinfer.plan.machine import VARIABLE, Machine, read_machine, shipped_machine
from heinfer.plan.work import ModeName
from heinfer.wire import Mode

logger = logging.getLogger(__name__)
#: What forecasts call the modes.
NAMES: Final[dict[Mode, ModeName]] = {Mode.STANDARD: "standard", Mode.PREPARED: "prepared", Mode.BATCH: "batch"}


class ModeChoice(enum.Enum):
    """What the operator of a node asks for."""

    AUTO = "auto"
    STANDARD = "standard"
    PREPARED = "prepared"


def choose_mode(plan: Plan, choice: ModeChoice, samples: int, batch: bool = False) -> Mode:
    """Return the mode for a query.

    Args:
        plan: the plan.
        choice: what the operator asks for; `PREPARED` leaves the choice between single samples and batches open.
        samples: of the query.
        batch: whether there are hints for batches.

    Raises:
        InputError: prepared mode is asked for, and the plan has none; or the file of this machine's constants is
            needed and can't be read.
    """
    modes = candidates(plan, choice, batch)
    if len(modes) == 1:
        return modes[0]
    forecasts = {Mode.PREPARED: forecast_prepared, Mode.BATCH: forecast_batch, Mode.STANDARD: forecast_standard}
    seconds = {mode: forecasts[mode](plan, samples) for mode in modes}
    return min(modes, key=seconds.__getitem__)


def candidates(plan: Plan, choice: ModeChoice, batch: bool) -> list[Mode]:
    """Return the modes that a choice leaves open. Arguments and errors as for `choose_mode`."""
    if choice is ModeChoice.STANDARD:
        return [Mode.STANDARD]
    if not plan.has_prepared_mode:
        if choice is ModeChoice.PREPARED:
            raise InputError("this plan has no prepared mode: a block's planes are too wide; use --mode standard")
        return [Mode.STANDARD]
    modes = [Mode.PREPARED, *([Mode.BATCH] if batch else [])]
    return modes if choice is ModeChoice.PREPARED else [*modes, Mode.STANDARD]


def forecast_prepared(plan: Plan, samples: int) -> float:
    """Return the seconds that a query takes in prepared mode, preparation included."""
    return _seconds(_Same(plan), "prepared", samples)


def forecast_standard(plan: Plan, samples: int) -> float:
    """Return the seconds that a query takes in standard mode."""
    return _seconds(_Same(plan), "standard", samples)


def forecast_batch(plan: Plan, samples: int) -> float:
    """Return the seconds that a query takes with hints for batches."""
    return _seconds(_Same(plan), "batch", samples)


class _Same:
    """A plan that is equal to itself alone: comparing plans takes longer than a query may wait."""

    __slots__ = ("plan",)

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.plan is other.plan

    def __hash__(self) -> int:
        return id(self.plan)


@lru_cache(maxsize=512)  # runs of joined queries have all sizes
def _seconds(same: _Same, mode: ModeName, samples: int) -> float:
    return forecast(same.plan, mode, samples, _machine()).total_s


@cache
def _machine() -> Machine:
    """Return the constants in use when this process first needs them.

    A node starts without them: a file that nobody named for it and that can't be used is said to be left out.
    """
    try:
        return read_machine()[0]
    except InputError as error:
        if os.environ.get(VARIABLE):
            raise
        logger.warning("the mode is chosen by the shipped constants: %s", error)
        return shipped_machine()
