"""The plan: what both parties agree on. Frozen, checked, without weights and without secrets.

    query --> NodeStep (onnxruntime) --> RoundStep (one or more blocks on the server) --> NodeStep --> ... --> result

Tensors are known by name; a tensor that a step makes is never made again. Shapes exclude the batch axis.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Final, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from heinfer.errors import PlanError
from heinfer.operators import HintKind, Outline, PreparedForm, Program
from heinfer.operators.steps import CONFIG
from heinfer.plan.deep import DeepBlock
from heinfer.plan.tensors import TensorSpec
from heinfer.ring import WEIGHT_BITS, RingParameters

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
#: More digits of weights than any bound can use.
MAX_DIGITS: Final = 8
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=128)]


@dataclass(frozen=True, slots=True, config=CONFIG)
class ModelInfo:
    """The model that was partitioned: its name and the SHA-256 of reference/model.onnx, external data included."""

    name: str
    sha256: Digest


@lru_cache(maxsize=16)
def _checked(degree: int, modulus: int) -> RingParameters:
    """Check parameters once: a proof of primality takes as long as encrypting a block."""
    return RingParameters(degree, modulus)


@dataclass(frozen=True, slots=True, config=CONFIG)
class RingInfo:
    """Ring parameters as numbers; `parameters` checks them against the security table."""

    degree: int
    modulus: int

    @property
    def parameters(self) -> RingParameters:
        """The checked parameters."""
        return _checked(self.degree, self.modulus)


@dataclass(frozen=True, slots=True, config=CONFIG)
class NodeStep:
    """Operators that the trusted node runs in the clear, as one ONNX model under onnxruntime.

    Attributes:
        model: file in node/.
        inputs: tensors it reads.
        outputs: tensors it makes.
        operators: what it holds, "name (type)" each, for people.
        reasons: why each of them is here, for people.
    """

    model: FileName
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    operators: tuple[str, ...]
    reasons: tuple[str, ...] = ()
    kind: Literal["node"] = "node"


@dataclass(frozen=True, slots=True, config=CONFIG)
class RoundStep:
    """Blocks that do not wait for each other: one round trip to the server."""

    blocks: tuple[int, ...]
    kind: Literal["round"] = "round"


@dataclass(frozen=True, slots=True, config=CONFIG)
class DeepStep:
    """One deep block: one round trip to the server, in which activations are polynomials."""

    block: Annotated[int, Field(ge=0)]
    kind: Literal["deep"] = "deep"


PlanStep = Annotated[NodeStep | RoundStep | DeepStep, Field(discriminator="kind")]


@dataclass(frozen=True, slots=True, config=CONFIG)
class PreparedInfo:
    """What prepared mode makes of a block; the cut itself follows (`heinfer.operators.cutting`).

    From program, degree and choice of dense hints node and server repeat it; the rest says what they must find.

    Attributes:
        degree: N of its ciphertexts.
        dense: steps of the program that have dense hints by choice.
        hints: kind of every hint: one a weighted step of the cut, where bands of rows are steps of their own.
        rows: polynomials, dense rows or weights of every hint.
        ciphertexts: polynomials a.
        values_up: residues of one sample's upload, padding included.
        values_down: residues of one sample's answer.
        joined: residues that are put together from bands of rows, or parts of the tokens.
        hint_bytes: what its hints take in node/.
    """

    degree: Annotated[int, Field(ge=1)]
    dense: tuple[int, ...]
    hints: tuple[HintKind, ...]
    rows: tuple[int, ...]
    ciphertexts: Annotated[int, Field(ge=0)]
    values_up: Annotated[int, Field(ge=1)]
    values_down: Annotated[int, Field(ge=1)]
    joined: Annotated[int, Field(ge=0)]
    hint_bytes: Annotated[int, Field(ge=0)]

    @classmethod
    def of(cls, form: PreparedForm | Outline) -> PreparedInfo:
        """Describe a cut."""
        return cls(
            degree=form.degree,
            dense=form.dense,
            hints=tuple(hint.kind for hint in form.hints),
            rows=tuple(hint.rows for hint in form.hints),
            ciphertexts=form.ciphertexts,
            values_up=form.values_up,
            values_down=form.values_down,
            joined=form.joined,
            hint_bytes=form.hint_bytes,
        )


@dataclass(frozen=True, slots=True, config=CONFIG)
class Block:
    """One affine map, evaluated under encryption.

    Attributes:
        inputs: tensors that are uploaded, under one secret key and one scale a sample.
        outputs: tensors that come back, each as the sum of its digits.
        program: the linear part, digit by digit; array names refer to server/weights.safetensors. Its outputs are
            output 0 of digit 0, output 0 of digit 1, ..., output 1 of digit 0, ...
        row_sum: L, the largest sum of |W_int| over a row of any digit.
        final: whether an output reaches the result without another block; such outputs are rounded.
        operators: what it holds, "name (type)" each, for people.
        unit_bound: error bound for inputs of magnitude at most 1.
        prepared: how it runs in prepared mode; None where it can't.
        reasons: why each operator is here, for people.
        digits: how many the weights have (`heinfer.ring.scales`).
        digit_bits: of each.
        relative_bound: error bound relative to the largest output for inputs of magnitude 1, of the worst row.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    program: Program
    row_sum: Annotated[int, Field(ge=0)]
    final: bool
    operators: tuple[str, ...]
    unit_bound: Annotated[float, Field(ge=0)]
    prepared: PreparedInfo | None
    reasons: tuple[str, ...] = ()
    digits: Annotated[int, Field(ge=1, le=MAX_DIGITS)] = 1
    digit_bits: Annotated[int, Field(ge=1, le=WEIGHT_BITS)] = WEIGHT_BITS
    relative_bound: Annotated[float, Field(ge=0)] = 0.0

    def __post_init__(self) -> None:
        """Check that tensors and program agree.

        Raises:
            PlanError: they do not.
        """
        if tuple(t.shape for t in self.inputs) != self.program.inputs:
            raise PlanError("a block's inputs and its program's differ in shape")
        if tuple(t.shape for t in self.outputs for _ in range(self.digits)) != self.program.output_shapes:
            raise PlanError(f"a block's outputs, in {self.digits} digits each, and its program's differ in shape")

    @property
    def input_rows(self) -> int:
        """Ciphertexts that one upload has in standard mode: one a value."""
        return sum(_size(t) for t in self.inputs)

    @property
    def output_rows(self) -> int:
        """Ciphertexts that come back in standard mode: one a value and digit."""
        return self.digits * sum(_size(t) for t in self.outputs)


@dataclass(frozen=True, slots=True, config=CONFIG)
class Digests:
    """SHA-256 over the files of each party's folder, plan.json and hints aside."""

    server: Digest
    node: Digest


@dataclass(frozen=True, slots=True, config=CONFIG)
class Plan:
    """All that client, node and server must agree on."""

    model: ModelInfo
    ring: RingInfo
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    steps: tuple[PlanStep, ...]
    blocks: tuple[Block, ...]
    digests: Digests
    deep: tuple[DeepBlock, ...] = ()
    format_version: Literal[6] = 6

    def __post_init__(self) -> None:
        """Check that every tensor is made before it is read, once, and every block runs once.

        Raises:
            PlanError: the plan is inconsistent.
            ParameterError: the ring parameters are refused.
        """
        _ = self.ring.parameters
        made = {t.name for t in self.inputs}
        pending, pending_deep = set(range(len(self.blocks))), set(range(len(self.deep)))
        for step in self.steps:
            if isinstance(step, NodeStep):
                reads, makes = set(step.inputs), list(step.outputs)
            elif isinstance(step, DeepStep):
                if step.block not in pending_deep:
                    raise PlanError(f"deep block {step.block} does not exist or has run already")
                pending_deep.remove(step.block)
                reads = {t.name for t in self.deep[step.block].inputs}
                makes = [t.name for t in self.deep[step.block].outputs]
            else:
                if not set(step.blocks) <= pending:
                    raise PlanError(f"round {step.blocks} names a block that does not exist or has run already")
                pending -= set(step.blocks)
                reads = {t.name for b in step.blocks for t in self.blocks[b].inputs}
                makes = [t.name for b in step.blocks for t in self.blocks[b].outputs]
            if not reads <= made or made & set(makes) or len(set(makes)) != len(makes):
                raise PlanError(f"a step reads {sorted(reads - made)} too early or makes a tensor twice")
            made |= set(makes)
        if pending or pending_deep or not {t.name for t in self.outputs} <= made:
            raise PlanError("a block never runs, or an output is never made")

    @property
    def has_prepared_mode(self) -> bool:
        """Whether every block can run in prepared mode."""
        return bool(self.blocks) and not self.deep and all(block.prepared is not None for block in self.blocks)

    @property
    def deep_slots(self) -> int:
        """Samples that an upload of every deep block holds; of a plan that has some."""
        return min(block.chain.parameters.slots for block in self.deep)

    @property
    def last_deep(self) -> frozenset[int]:
        """Deep blocks of which an output reaches the result without another block."""
        wanted, found = {t.name for t in self.outputs}, set()
        for step in reversed(self.steps):
            if isinstance(step, NodeStep) and wanted & set(step.outputs):
                wanted |= set(step.inputs)
            elif isinstance(step, DeepStep) and wanted & {t.name for t in self.deep[step.block].outputs}:
                found.add(step.block)
        return frozenset(found)

    @property
    def rounds(self) -> int:
        """Round trips to the server for one query."""
        return sum(isinstance(step, RoundStep | DeepStep) for step in self.steps)


def _size(tensor: TensorSpec) -> int:
    size = 1
    for length in tensor.shape:
        size *= length
    return size
