"""Choose how a block is cut for prepared mode: N, bands of rows, kinds of hints, by forecast.

requires  a server program and its index maps
ensures   the cut that is forecast to take least of all outlines; the node repeats it from what the plan says of it

A plan must not depend on the machine that made it, so constants and link are those of `partitioner.costs`. A larger N
has more room for planes and costs more a polynomial; bands of rows need their halo sent again; a dense hint spares
products of polynomials and has more rows.

Worked example: a 1x1 convolution of planes of 112x112, 64 channels to 64. At N = 8192 they lie in 2 bands: 256 products
of 8192 coefficients in 13 levels. At N = 2048 they lie in 7 bands: 848 products of 2048 in 11, 30 % less, and as much
to send. Planes of 56x56 fit N = 4096 in one piece. At N = 2048 two bands would save 8 % of the products, but they would
have to be put together, which costs more.
"""

from __future__ import annotations

from typing import Final

from heinfer.operators import Outline, PreparedForm, Program, outlines, prepare_form
from heinfer.operators.prepared import Maps
from heinfer.plan import PreparedInfo
from heinfer.plan.forecast import forecast_form
from heinfer.plan.machine import SHIPPED
from partitioner.costs import REFERENCE_LINK

#: Seconds that a byte of a hint in node/ is worth, each time a sample is prepared: 1.28 bytes of memory are read for
#: it, at some 13 GB a second for both cores, and half as much for making, storing and loading it.
HINT_BYTE_S: Final = 1.5e-10


def choose_form(program: Program, maps: Maps, degree: int) -> PreparedForm | None:
    """Cut a block in the way that is forecast to take least.

    Args:
        program: the block's server program.
        maps: at least its index maps.
        degree: N of the plan's ring; a block's may be larger.

    Returns:
        The cut; None where a row of a window fits no degree.
    """
    found = min(outlines(program, degree), key=lambda outline: cost(program, outline), default=None)
    return None if found is None else prepare_form(program, maps, found.degree, found.dense)


def cost(program: Program, outline: Outline) -> float:
    """Return the seconds that a cut is forecast to take for one sample, and the price of what is kept for it."""
    return forecast_form(program, PreparedInfo.of(outline), SHIPPED, REFERENCE_LINK) + HINT_BYTE_S * outline.hint_bytes
