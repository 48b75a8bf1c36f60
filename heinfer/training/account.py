"""Where a run pays: the gates of its own budget and of all runs together, then the ledger, before each step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from heinfer.training.privacy.budget import BudgetGate
from heinfer.training.privacy.ledger import TRAINING, Ledger
from heinfer.training.privacy.mechanisms import Mechanism, merge
from heinfer.training.privacy.planning import PrivacyPlan

#: Purpose of an evaluation's release in the ledger.
EVALUATION = "evaluation"


class RunAccount:
    """The account of one run.

    A step that the ledger has already, since the run was killed after it, is free: it is taken again with the same
    records and the same noise.

    Args:
        ledger: of the private records; the run is open in it.
        run_id: name of the run.
        plan: what the run will take.
        allowance: epsilon that all runs on these records together may reach, None for no such limit. What other
            processes spend meanwhile counts.
    """

    def __init__(self, ledger: Ledger, run_id: str, plan: PrivacyPlan, allowance: float | None = None) -> None:
        self._ledger = ledger
        self._run_id = run_id
        self._plan = plan
        self._allowance = allowance
        self._own = merge(ledger.spent(run_id))
        target = plan.target_epsilon or math.nextafter(plan.epsilon_pld, math.inf)
        self._gate = BudgetGate(target, plan.delta, spent=self._own, planned=self._left())
        self._others: tuple[Mechanism, ...] | None = None
        self._shared: BudgetGate | None = None

    def charge(self, step: int, mechanism: Mechanism, purpose: str = TRAINING) -> None:
        """Pay for a step; on the disk when this returns.

        Raises:
            PrivacyBudgetError: a target would be passed, or the step was paid for as another; nothing is written.
        """

        def allow(others: tuple[Mechanism, ...]) -> None:
            self._gate.check(mechanism)
            if self._allowance is not None:
                self._shared_gate(others, self._allowance).check(mechanism)

        if self._ledger.spend(self._run_id, step, mechanism, purpose, allow):
            self._own = merge((*self._own, mechanism))
            self._gate.spend(mechanism)
            if self._shared is not None:
                self._shared.spend(mechanism)

    def _shared_gate(self, others: tuple[Mechanism, ...], allowance: float) -> BudgetGate:
        """Return the gate of all runs together; a new one where others have spent since."""
        if self._shared is None or others != self._others:
            spent = (*others, *self._own)
            self._shared = BudgetGate(allowance, self._plan.delta, spent=spent, planned=self._left())
            self._others = others
        return self._shared

    def _left(self) -> list[Mechanism]:
        """What is planned and not yet spent."""
        return _subtract(self._plan.mechanisms(), self._own)


def _subtract(planned: Iterable[Mechanism], spent: Iterable[Mechanism]) -> list[Mechanism]:
    """Return what is planned and not spent."""
    counts: Counter[Mechanism] = Counter()
    for mechanism in planned:
        counts[mechanism.times(1)] += mechanism.count
    for mechanism in spent:
        counts[mechanism.times(1)] -= mechanism.count
    return [single.times(count) for single, count in counts.items() if count > 0]
