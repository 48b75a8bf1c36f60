"""Which mode a query runs in.

Prepared mode needs hints for every block, and takes one sample as well as many: about 1 ms of one core for a LeNet-5
sample, where standard mode takes 1.8 ms a sample in full batches of N and as long for one as for all of them. Where a
bundle has hints for batches, full batches cost a fraction of either. `auto` takes what the forecast says is fastest.
"""

from __future__ import annotations

import enum
from typing import Final

from heinfer.errors import InputError
from heinfer.operators import HintKind
from heinfer.plan import Block, Plan
from heinfer.wire import Mode

# Seconds of one core, measured on an AMD EPYC at 2.4 GHz by benchmarks/prepared_queries.py and
# benchmarks/encrypted_models.py.
_NTT_S: Final = 5.5e-10  # a coefficient of a polynomial times secret, and a level of the transform
_DENSE_S: Final = 2.5e-10  # a residue of a dense hint
_VALUE_S: Final = 1.5e-8  # a value: noise, mask, packing, both ways
_SEAL_S: Final = 2.2e-7  # a coefficient of a ciphertext that SEAL encrypts or decrypts
_PRODUCT_S: Final = 1.2e-10  # a multiply-add of the server, both limbs


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
        InputError: prepared mode is asked for, and the plan has none.
    """
    if choice is ModeChoice.STANDARD:
        return Mode.STANDARD
    if not plan.has_prepared_mode:
        if choice is ModeChoice.PREPARED:
            raise InputError("this plan has no prepared mode: a block's planes are too wide; use --mode standard")
        return Mode.STANDARD
    forecasts = {Mode.PREPARED: forecast_prepared(plan, samples)}
    if batch:
        forecasts[Mode.BATCH] = forecast_batch(plan, samples)
    if choice is ModeChoice.AUTO:
        forecasts[Mode.STANDARD] = forecast_standard(plan, samples)
    return min(forecasts, key=lambda mode: forecasts[mode])


def forecast_prepared(plan: Plan, samples: int) -> float:
    """Return the seconds of one core that a query takes in prepared mode, preparation included."""
    return samples * sum(_prepared_sample(block) for block in plan.blocks)


def forecast_standard(plan: Plan, samples: int) -> float:
    """Return the seconds of one core that a query takes in standard mode."""
    degree = plan.ring.degree
    groups = -(-samples // degree)
    ciphertexts = sum(block.input_rows + block.output_rows for block in plan.blocks)
    products = sum(block.program.multiply_adds() for block in plan.blocks)
    return groups * (ciphertexts * degree * _SEAL_S + products * degree * _PRODUCT_S) + samples * products * _PRODUCT_S


def forecast_batch(plan: Plan, samples: int) -> float:
    """Return the seconds of one core that a query takes with hints for batches."""
    degree = plan.ring.degree
    groups, levels = -(-samples // degree), degree.bit_length() - 1
    values = sum(block.input_rows + block.output_rows for block in plan.blocks)
    products = sum(block.program.multiply_adds() for block in plan.blocks)
    return groups * values * degree * levels * _NTT_S + samples * (values * _VALUE_S + products * _PRODUCT_S)


def _prepared_sample(block: Block) -> float:
    prepared = block.prepared
    assert prepared is not None  # the plan has prepared mode
    residues = prepared.hint_bytes / 6.25
    levels = prepared.degree.bit_length() - 1
    kinds = set(prepared.hints)
    products = residues * (_DENSE_S if kinds == {HintKind.DENSE} else levels * _NTT_S)
    masks = prepared.ciphertexts * prepared.degree * levels * _NTT_S
    return (
        products
        + masks
        + (prepared.values_up + prepared.values_down) * _VALUE_S
        + block.program.multiply_adds() * _PRODUCT_S
    )
