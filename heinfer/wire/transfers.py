"""One block request from announcement to last answered row: counters, no data.

In standard mode a row is one ciphertext: b, of which only the first `samples` residues carry values, and a, all N.
At N = 2048 and 100 samples a row is 800 + 12800 = 13600 bytes.
In prepared mode only b travels, every sample packed by itself, and a row is one group of 32 residues, 200 bytes. A
sample of 3 * 32 * 32 = 3072 values is 96 rows; one of 10 values, a row. In a batch a row is b of one ciphertext.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from heinfer.errors import LocalProtocolError, ParameterError
from heinfer.ring.packing import GROUP_RESIDUES, packed_bytes
from heinfer.wire.messages import BlockAnswer, BlockRequest, Chunk, Mode

#: Bytes of a row in prepared mode.
GROUP_BYTES = packed_bytes(GROUP_RESIDUES)


class Role(enum.Enum):
    """The two ends of a session."""

    NODE = "node"
    SERVER = "server"

    __hash__ = object.__hash__  # that of an Enum is in Python and slow


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What the plan says about the ciphertexts of one block.

    Attributes:
        input_rows: elements of its input.
        output_rows: elements of its output.
        degree: N, coefficients of a ciphertext.
        values_up: residues of one sample's upload in prepared mode; 0 where the block has no prepared form.
        values_down: residues of one sample's answer in prepared mode; likewise.
        deep: whether this is a deep block: a row is a polynomial modulo one prime, and there are no other modes.
    """

    input_rows: int
    output_rows: int
    degree: int
    values_up: int = 0
    values_down: int = 0
    deep: bool = False

    def __post_init__(self) -> None:
        if min(self.input_rows, self.output_rows, self.degree) < 1:
            raise ParameterError(f"rows and degree of a block must be at least 1, got {self}")
        if min(self.values_up, self.values_down) < 0 or (self.values_up == 0) != (self.values_down == 0):
            raise ParameterError(f"values of a block must both be positive, or both 0, got {self}")

    def supports(self, mode: Mode) -> bool:
        """Whether the block can be asked for in this mode."""
        if self.deep or mode is Mode.DEEP:
            return self.deep and mode is Mode.DEEP
        return mode is not Mode.PREPARED or self.values_up > 0

    def max_samples(self, mode: Mode, limit: int) -> int:
        """The most samples of one request under a limit of `limit`."""
        if mode is Mode.DEEP:
            return min(self.degree // 2, limit)  # slots
        return min(self.degree, limit) if mode is not Mode.PREPARED else limit

    def rows_up(self, mode: Mode, samples: int) -> int:
        """Rows of a request with this many samples."""
        return self.input_rows if mode is not Mode.PREPARED else samples * _groups(self.values_up)

    def rows_down(self, mode: Mode, samples: int) -> int:
        """Rows of its answer."""
        return self.output_rows if mode is not Mode.PREPARED else samples * _groups(self.values_down)

    def row_bytes(self, mode: Mode, samples: int) -> int:
        """Bytes of each of these rows, both ways."""
        match mode:
            case Mode.STANDARD:
                return row_bytes(samples, self.degree)
            case Mode.BATCH:
                return packed_bytes(samples)
            case Mode.PREPARED:
                return GROUP_BYTES
            case Mode.DEEP:
                return packed_bytes(self.degree)

    def sizes(self, mode: Mode, samples: int) -> Sizes:
        """All of these."""
        up, down = self.rows_up(mode, samples), self.rows_down(mode, samples)
        return Sizes(samples, up, down, self.row_bytes(mode, samples), self.max_samples(mode, samples))


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the plan says about a request of that many samples; `max_samples` is less where it may not have so many."""

    samples: int
    rows_up: int
    rows_down: int
    row_bytes: int
    max_samples: int


def _groups(values: int) -> int:
    return packed_bytes(values) // GROUP_BYTES


def row_bytes(samples: int, degree: int) -> int:
    """Bytes of one ciphertext in standard mode, b with `samples` residues and a with `degree`."""
    return packed_bytes(samples) + packed_bytes(degree)


class Stage(enum.Enum):
    """Where a request is."""

    UPLOADING = "uploading"
    UPLOADED = "uploaded"
    ANSWERING = "answering"
    ANSWERED = "answered"

    __hash__ = object.__hash__


#: (stage, sender, event) -> (stage after it, stage after it if it brings the last row). What is missing is forbidden.
STAGES: dict[tuple[Stage, Role, type], tuple[Stage, Stage]] = {
    (Stage.UPLOADING, Role.NODE, Chunk): (Stage.UPLOADING, Stage.UPLOADED),
    (Stage.UPLOADED, Role.SERVER, BlockAnswer): (Stage.ANSWERING, Stage.ANSWERING),
    (Stage.ANSWERING, Role.SERVER, Chunk): (Stage.ANSWERING, Stage.ANSWERED),
}


class Transfer:
    """The state of one request, the same on both sides.

    Attributes:
        request: how it was announced.
        row_bytes: bytes of each of its rows, both ways.
        stage: where it is.
    """

    __slots__ = ("_next_row", "_output_rows", "_rows", "request", "row_bytes", "stage")

    def __init__(self, request: BlockRequest, sizes: Sizes) -> None:
        self.request = request
        self.row_bytes = sizes.row_bytes
        self.stage = Stage.UPLOADING
        self._rows = sizes.rows_up
        self._output_rows = sizes.rows_down
        self._next_row = 0

    def advance(self, sender: Role, event: Chunk | BlockAnswer) -> Stage:
        """Take one event of this request; return where it then is.

        Raises:
            LocalProtocolError: it may not come now, or its counts are wrong; the state is as before.
        """
        stages = STAGES.get((self.stage, sender, type(event)))
        if stages is None:
            raise LocalProtocolError(
                f"{type(event).__name__} from the {sender.value} for request {event.request_id}, "
                f"which is {self.stage.value}"
            )
        if isinstance(event, BlockAnswer):
            if event.rows != self._output_rows:
                raise LocalProtocolError(
                    f"answer {event.request_id} announces {event.rows} rows, the plan says {self._output_rows}"
                )
            self._rows, self._next_row = event.rows, 0
            self.stage = stages[0]
        else:
            self._check_chunk(event)
            self._next_row += event.rows
            self.stage = stages[self._next_row == self._rows]
        return self.stage

    def _check_chunk(self, chunk: Chunk) -> None:
        left = self._rows - self._next_row
        if chunk.first_row != self._next_row:
            problem = f"expected row {self._next_row}, got row {chunk.first_row}"
        elif not 1 <= chunk.rows <= left:
            problem = f"rows must be in [1, {left}], got {chunk.rows}"
        elif len(chunk.data) != chunk.rows * self.row_bytes:
            problem = f"{chunk.rows} rows of {self.row_bytes} bytes expected, got {len(chunk.data)} bytes"
        else:
            return
        raise LocalProtocolError(f"chunk of request {chunk.request_id}: {problem}")


def iterate_row_chunks(request_id: int, data: bytes | memoryview, row_bytes: int, chunk_bytes: int) -> Iterator[Chunk]:
    """Cut packed rows into chunks.

    Args:
        request_id: the request that they belong to.
        data: all rows, one after the other, C-contiguous.
        row_bytes: bytes of one row.
        chunk_bytes: the most that a chunk may carry, at least one row.

    Yields:
        Chunks. Their data are views, not copies: for whoever sends them before the rows are changed.

    Raises:
        LocalProtocolError: data is no whole number of rows, or a row does not fit into a chunk.
    """
    view = memoryview(data).cast("B")
    total, rest = divmod(len(view), row_bytes)
    if rest:
        raise LocalProtocolError(f"{len(view)} bytes are no whole number of rows of {row_bytes} bytes")
    step = chunk_bytes // row_bytes
    if step == 0:
        raise LocalProtocolError(f"a row of {row_bytes} bytes does not fit into a chunk of {chunk_bytes}")
    for first in range(0, total, step):
        rows = min(step, total - first)
        part = view[first * row_bytes : (first + rows) * row_bytes]
        yield Chunk(request_id, first, rows, cast(bytes, part))
