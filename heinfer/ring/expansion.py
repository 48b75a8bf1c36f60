"""Public uniform polynomials, expanded from a seed: the a of every ciphertext.

Worked example: seed, plan hash, block 3 and ciphertext 7 at N = 2048 are hashed to 2112 words of 8 bytes; each is
masked to 50 bits and kept if it is below q. Whoever holds the seed makes the same polynomial: it never travels.

Format, which must not change while a bundle lives. SHAKE-128 (FIPS 202) absorbs

    tag | N: 4 bytes | q: 8 bytes | seed: 32 | context: 32 | block: 8 | ciphertext: 8        integers little-endian

All fields have a fixed width, so different inputs are different strings, and the tag keeps them apart from any other
use of the hash. Residue i of the polynomial is the i-th little-endian 64-bit word of the output that is below q in its
lower 50 bits. SHAKE's output of one length begins with its output of any shorter one, so the result does not depend on
how many words are asked for at once.

The values are public, so the time that rejection takes tells nothing. Whoever could *choose* a could hide a trapdoor in
it; nobody chooses the output of a hash, which is modelled as a random function.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import ParameterError
from heinfer.ring.parameters import MODULUS_BITS, RingParameters

SEED_BYTES: Final = 32
CONTEXT_BYTES: Final = 32

_TAG: Final = b"heinfer uniform polynomial 1"
_WORD_BYTES: Final = 8
_MASK: Final = 2**MODULUS_BITS - 1
#: Words beyond the expected number, so that one request nearly always does. A default modulus refuses a word with
#: probability below 2**-24, and any modulus with probability below 1/2.
_SPARE_WORDS: Final = 64


def expand_uniform(
    seed: bytes, context: bytes, block: int, ciphertext: int, parameters: RingParameters
) -> NDArray[np.int64]:
    """Expand a seed to one polynomial, uniform modulo q (SHAKE-128 as a random oracle).

    Args:
        seed: 32 bytes, uniform and fresh when they were made.
        context: 32 bytes that bind the polynomial to its use: the hash of the plan.
        block: index of the block, 0 to 2**64 - 1.
        ciphertext: index of the ciphertext within the block, likewise.
        parameters: ring.

    Returns:
        int64 residues in [0, q), shape (N,).

    Raises:
        ParameterError: a field has another length or range.
    """
    for name, field, length in (("seed", seed, SEED_BYTES), ("context", context, CONTEXT_BYTES)):
        if len(field) != length:
            raise ParameterError(f"{name}: expected {length} bytes, found {len(field)}; pass the plan's own")
    for name, index in (("block", block), ("ciphertext", ciphertext)):
        if not 0 <= index < 2**64:
            raise ParameterError(f"{name}: expected an index from 0 to 2**64 - 1, found {index}; count from zero")
    degree, modulus = parameters.degree, parameters.modulus
    numbers = ((degree, 4), (modulus, 8)), ((block, 8), (ciphertext, 8))
    head, tail = (b"".join(number.to_bytes(width, "little") for number, width in group) for group in numbers)
    sponge = hashlib.shake_128(_TAG + head + bytes(seed) + bytes(context) + tail)
    words = (degree << MODULUS_BITS) // modulus + _SPARE_WORDS
    while True:
        drawn: NDArray[np.int64] = np.frombuffer(sponge.digest(words * _WORD_BYTES), "<u8").astype(np.int64) & _MASK
        accepted: NDArray[np.int64] = drawn[drawn < modulus]
        if accepted.size >= degree:
            return np.array(accepted[:degree])
        words += _SPARE_WORDS
