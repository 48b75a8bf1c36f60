"""Random edits of bytes, as hypothesis strategies: what a damaged disk, a hostile peer or a careless tool may make."""

from __future__ import annotations

from hypothesis import strategies as st

#: Bytes that mean something in lengths, varints, JSON and text.
_TOKENS = st.sampled_from(
    [b"\0", b"\x7f", b"\x80", b"\xff", b"\xff" * 4, b"\xff" * 8, b"\xff\xff\xff\xff\x0f", b"\xff" * 9 + b"\x01",
     b"\x00\x00\x00\x40", b"1e999", b"-1", b"99999999999", b"[", b"{", b'"', b"null", b"\xed\xa0\x80", b"\n"]
)  # fmt: skip
_EDITS = st.sampled_from(["flip", "set", "insert", "delete", "repeat", "cut", "token"])


@st.composite
def mutated(draw: st.DrawFn, content: bytes, most: int = 4) -> bytes:
    """Return the content with one to `most` edits."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, most))):
        position = draw(st.integers(0, max(0, len(data) - 1)))
        length = draw(st.integers(1, 16))
        match draw(_EDITS):
            case "flip" if data:
                data[position] ^= 1 << draw(st.integers(0, 7))
            case "set" if data:
                data[position] = draw(st.integers(0, 255))
            case "insert":
                data[position:position] = draw(st.binary(min_size=1, max_size=16))
            case "delete":
                del data[position : position + length]
            case "repeat":
                data[position:position] = data[position : position + length] * draw(st.sampled_from([1, 2, 100]))
            case "cut":
                del data[position:]
            case _:
                token = draw(_TOKENS)
                data[position : position + draw(st.sampled_from([0, len(token)]))] = token
    return bytes(data)
