"""What a value and a product cost, for decisions that come out the same on every machine.

    shipped constants of a machine, a reference link  -->  nanoseconds  -->  capacities of the minimum cut

A plan must not depend on the machine that made it, so these are the shipped constants (`heinfer.plan.machine.SHIPPED`)
and a link of 1 Gbit/s and 1 ms: a value up costs 65 ns, one down 66 ns, of which 50 ns are on the wire; a round that is
saved, 1.8 ms. So a value weighs as much as 220 multiply-adds on the server.

In the cut bytes come first, and time decides between placements of equal bytes. Free operators themselves cost nothing
there: whichever side runs them, they take a nanosecond a value.
"""

from __future__ import annotations

from typing import Final

from heinfer.plan.machine import SHIPPED, Link
from heinfer.ring import COEFFICIENT_BYTES

REFERENCE_LINK: Final = Link(bandwidth=1e9, rtt_s=1e-3)
_NS: Final = 1e9
_CARRIED_S: Final = COEFFICIENT_BYTES * SHIPPED.byte_s + REFERENCE_LINK.seconds(COEFFICIENT_BYTES, 0)
#: A value that the node encrypts and the server unpacks; one that the server packs and the node decrypts.
UP_NS: Final = round(_NS * (SHIPPED.up_s + SHIPPED.residue_s + _CARRIED_S))
DOWN_NS: Final = round(_NS * (SHIPPED.down_s + SHIPPED.residue_s + _CARRIED_S))
#: A round of one block, values and products aside.
ROUND_NS: Final = round(
    _NS * (SHIPPED.exchange_s + SHIPPED.node_block_s + SHIPPED.server_block_s + REFERENCE_LINK.seconds(0, 1))
)
_PRODUCT_NS: Final = _NS * SHIPPED.product_s
#: More nanoseconds than all values of a model take together: one value less outweighs them.
_BYTES_FIRST: Final = 10**13
#: What a value costs in the cut, up and down.
UP: Final = _BYTES_FIRST + UP_NS
DOWN: Final = _BYTES_FIRST + DOWN_NS


def products_ns(multiply_adds: int) -> int:
    """Return the nanoseconds of multiply-adds on the server."""
    return round(multiply_adds * _PRODUCT_NS)
