"""Which mode a query runs in.

Prepared mode needs hints for every block, and takes one sample as well as many: 0.5 ms of one core for a LeNet-5
sample, where standard mode takes 1.8 ms a sample in full batches of N and as long for one as for all of them. So `auto`
takes standard mode only where a plan has no prepared mode, or where the forecast says that it is faster.
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


def choose_mode(plan: Plan, choice: ModeChoice, samples: int) -> Mode:
    """Return the mode for a query.

    Raises:
        InputError: prepared mode is asked for, and the plan has none.
    """
    if choice is ModeChoice.STANDARD:
        return Mode.STANDARD
    if not plan.has_prepared_mode:
        if choice is ModeChoice.PREPARED:
            raise InputError("this plan has no prepared mode: a block's planes are too wide; use --mode standard")
        return Mode.STANDARD
    if choice is ModeChoice.PREPARED or forecast_prepared(plan, samples) <= forecast_standard(plan, samples):
        return Mode.PREPARED
    return Mode.STANDARD


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
