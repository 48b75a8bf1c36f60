"""What a block means to both parties, counted: values, products, polynomials, messages, bytes.

    plan, block, mode, samples --> Work --(times the constants of a machine, `heinfer.plan.forecast`)--> seconds

Worked example: a 3x3 convolution of 16 channels of 32x32 to 16, one sample in prepared mode. 16 x 34 x 34 residues go
up and 16,384 come back, 2.4 million multiply-adds. A node prepares it by 32 products of polynomials, and one transform
of a secret.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final, Literal

from heinfer.operators import HintKind, Program
from heinfer.operators.steps import Conv, MatMul, Scale
from heinfer.plan.schema import Block, PreparedInfo, RingInfo
from heinfer.ring import LANES, packed_bytes

ModeName = Literal["standard", "prepared", "batch"]
#: Largest payload of a message (`heinfer.wire`).
CHUNK_BYTES: Final = 2**20
#: Rows that a worker process encrypts at a time in standard mode (`trusted_node.uploads`); it decrypts a message's.
TASK_ROWS: Final = 32
#: Samples from which on they share the lanes of a transform (`trusted_node.preparation`).
LANES_OF_SAMPLES: Final = 4


@dataclass(frozen=True, slots=True)
class Work:
    """What a block means in a mode, for all samples.

    Attributes:
        requests: to the server.
        up: values encrypted.
        down: values decrypted.
        residues_up: residues that the server unpacks.
        residues_down: residues that it packs.
        moved: residues that it copies besides: put together from bands (so does the node, before the query), or
            transposed, where samples are coefficients.
        products: multiply-adds.
        weights: read for one request.
        sealed: ciphertexts of one request that SEAL encrypts and decrypts, up and down.
        tasks: how many of them a worker process takes at a time, up and down.
        prepared: jobs of preparing it: samples, or as many as share a transform's lanes.
        transformed: coefficients of products with secrets, made before the query.
        transformed_online: the same during the query.
        levels: of the transform.
        dense: residues of dense hints that meet a secret.
        bytes_up: payload.
        bytes_down: payload.
    """

    requests: int
    up: int
    down: int
    residues_up: int
    residues_down: int
    products: int
    weights: int
    levels: int
    bytes_up: int
    bytes_down: int
    sealed: tuple[int, int] = (0, 0)
    tasks: tuple[int, int] = (1, 1)
    prepared: int = 0
    transformed: int = 0
    transformed_online: int = 0
    dense: int = 0
    moved: int = 0

    @property
    def messages(self) -> int:
        """Messages of all requests and answers."""
        sizes = (self.bytes_up, self.bytes_down)
        return sum(self.requests * max(1, -(-size // (self.requests * CHUNK_BYTES))) for size in sizes)


def prepared_work(program: Program, form: PreparedInfo, samples: int, groups: int) -> Work:
    """Count what a block takes in prepared mode: every sample has ciphertexts of its own."""
    up, down = samples * form.values_up, samples * form.values_down
    lanes, dense = _in_lanes(form.ciphertexts, samples), 0
    secrets = samples if samples < LANES_OF_SAMPLES else _in_lanes(1, samples)  # few share lanes with other blocks'
    for kind, rows in zip(form.hints, form.rows, strict=True):
        match kind:
            case HintKind.POLYNOMIAL:
                lanes += _in_lanes(rows, samples)
            case HintKind.DENSE:
                dense += rows
            case HintKind.ELEMENTWISE:
                pass
    return Work(
        requests=groups,
        up=up,
        down=down,
        residues_up=up,
        residues_down=down,
        products=samples * program.multiply_adds(),
        weights=weight_count(program),
        levels=form.degree.bit_length() - 1,
        bytes_up=samples * packed_bytes(form.values_up),
        bytes_down=samples * packed_bytes(form.values_down),
        prepared=samples if samples < LANES_OF_SAMPLES else -(-samples // LANES),
        transformed=(lanes + secrets) * form.degree,
        dense=samples * dense * form.degree,
        moved=samples * form.joined,
    )


def coefficient_work(ring: RingInfo, block: Block, mode: ModeName, samples: int, groups: int) -> Work:
    """Count what a block takes where samples are coefficients: a ciphertext a value, both parts or b alone."""
    degree, rows_up, rows_down, program = ring.degree, block.input_rows, block.output_rows, block.program
    fixed = groups * degree if mode == "standard" else 0  # a, which is as long for one sample as for N
    columns = samples + fixed
    whole, rest = divmod(samples, degree)
    size = whole * packed_bytes(degree) + packed_bytes(rest) + packed_bytes(fixed)
    lanes = (-(-rows_up // LANES) + -(-rows_down // LANES)) * LANES
    chunk = max(1, CHUNK_BYTES // (packed_bytes(min(samples, degree)) + packed_bytes(degree)))
    return Work(
        requests=groups,
        up=samples * rows_up,
        down=samples * rows_down,
        residues_up=columns * rows_up,
        residues_down=columns * rows_down,
        products=columns * program.multiply_adds(),
        weights=weight_count(program),
        levels=degree.bit_length() - 1,
        bytes_up=size * rows_up,
        bytes_down=size * rows_down,
        sealed=(rows_up, rows_down) if mode == "standard" else (0, 0),
        tasks=(min(TASK_ROWS, chunk), chunk),
        moved=columns * (rows_up + rows_down),
        transformed_online=groups * degree * lanes if mode == "batch" else 0,
    )


def weight_count(program: Program) -> int:
    """Return the integer weights that a program reads, counted for every step that uses them."""
    shapes = program.shapes
    total = 0
    for step in program.steps:
        match step:
            case Conv():
                total += step.shape[0] * shapes[step.source][0] // step.group * prod(step.window.kernel)
            case MatMul():
                total += shapes[step.source][-1] * step.shape[-1]
            case Scale():
                total += prod(step.shape)
            case _:
                pass
    return total


def _in_lanes(polynomials: int, samples: int) -> int:
    """Return the products of polynomials with secrets: made LANES at a time, empty lanes included."""
    if samples < LANES_OF_SAMPLES:
        return samples * -(-polynomials // LANES) * LANES
    return polynomials * -(-samples // LANES) * LANES
