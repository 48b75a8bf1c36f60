"""The gate in front of every use of private data: what would pass the target is not taken.

    gate = BudgetGate(3.0, 1e-5, spent=ledger.spent(), planned=plan.mechanisms())
    gate.spend(plan.mechanism(step))      # before the step; PrivacyBudgetError ends the run

Accounting takes tenths of a second, so the gate does not account for each step: it establishes once that a number of
further mechanisms fits (all that are planned, or else doubling and halving), and counts down. Part of what fits fits
as well, in any order, as leaving something out never costs more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from heinfer.errors import ParameterError, PrivacyBudgetError
from heinfer.training.privacy.accounting import check_delta, compute_epsilon, fits
from heinfer.training.privacy.mechanisms import Mechanism

#: How many repetitions the gate asks for at first when a mechanism was not planned.
_FIRST_STRIDE = 16


class BudgetGate:
    """Counts what is spent and refuses what would pass the target.

    Args:
        target_epsilon: never passed.
        delta: at which epsilon is meant.
        spent: what was taken before, by any run on the same data.
        planned: what will be taken, if it is known: accounted for in one go. It is no obligation, and what is not in
            it can still be spent, as far as it fits.

    Raises:
        ParameterError: the target is no positive number, or delta is out of range.
    """

    def __init__(
        self,
        target_epsilon: float,
        delta: float,
        spent: Iterable[Mechanism] = (),
        planned: Iterable[Mechanism] = (),
    ) -> None:
        if not (math.isfinite(target_epsilon) and target_epsilon > 0):
            raise ParameterError(f"expected a positive target epsilon, found {target_epsilon!r}")
        check_delta(delta)
        self._target = target_epsilon
        self._delta = delta
        self._spent = _count(spent)
        self._granted = _count(planned)
        self._stride = _FIRST_STRIDE
        if not self._fits(self._granted):
            self._granted.clear()

    @property
    def epsilon(self) -> float:
        """What was spent so far; takes the accountant up to seconds where noise moved through many levels."""
        return compute_epsilon(_expand(self._spent), self._delta)

    @property
    def spent(self) -> tuple[Mechanism, ...]:
        """Everything that was spent, merged."""
        return tuple(_expand(self._spent))

    def check(self, mechanism: Mechanism) -> None:
        """Do nothing if the mechanism may be taken now.

        Raises:
            PrivacyBudgetError: with it, the target would be passed. Nothing is counted.
        """
        single = mechanism.times(1)
        if self._granted[single] < mechanism.count and not self._grant(single, mechanism.count):
            raise PrivacyBudgetError(
                f"{mechanism} would bring epsilon to {self._with(mechanism):.4g} at delta {self._delta:g}; the target "
                f"is {self._target:g} and {self.epsilon:.4g} is spent: stop here, or train with more noise"
            )

    def spend(self, mechanism: Mechanism) -> None:
        """Check a mechanism and count it; call this before it is taken.

        Raises:
            PrivacyBudgetError: as `check`.
        """
        self.check(mechanism)
        single = mechanism.times(1)
        self._granted[single] -= mechanism.count
        self._spent[single] += mechanism.count

    def _grant(self, single: Mechanism, count: int) -> bool:
        """Find at least `count` more repetitions that fit; what was granted otherwise is kept if it still fits too."""
        first = stride = max(count, self._stride)
        kept = +self._granted
        for amount in dict.fromkeys((stride, count)) if kept else ():
            if self._fits(kept + Counter({single: amount})):
                self._granted[single] += amount
                return True
        self._granted.clear()
        while not self._fits(Counter({single: stride})):
            if stride == count:
                return False
            stride = max(count, stride // 2)
        self._granted[single] = stride
        self._stride = 2 * stride if stride == first else max(stride // 2, 1)
        return True

    def _fits(self, more: Counter[Mechanism]) -> bool:
        return fits(_expand(self._spent + more), self._delta, self._target)

    def _with(self, mechanism: Mechanism) -> float:
        return compute_epsilon([*_expand(self._spent), mechanism], self._delta)


def _count(mechanisms: Iterable[Mechanism]) -> Counter[Mechanism]:
    counts: Counter[Mechanism] = Counter()
    for mechanism in mechanisms:
        counts[mechanism.times(1)] += mechanism.count
    return counts


def _expand(counts: Counter[Mechanism]) -> list[Mechanism]:
    return [single.times(count) for single, count in counts.items() if count > 0]
