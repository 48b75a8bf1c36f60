"""What becomes of every operator, as docs/operators.md says it.

    python -m partitioner.catalogue > docs/operators.md

What the server can do is `partitioner.classification.RULES`, what it lacks is `LACKING` there. Here are what is
rewritten before (`partitioner.rewriting` does it), and which of onnx's own node tests are left out, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from textwrap import fill
from types import MappingProxyType

from partitioner.classification import LACKING, RULES
from partitioner.conversion import OLDEST, OPSET

#: Composite operators, and what `partitioner.rewriting` makes of them.
REWRITTEN: Mapping[str, str] = MappingProxyType(
    {
        "LSTM": "one MatMul for all time steps, one for each; gates on the node. All attributes, both layouts",
        "GRU": "as LSTM; two MatMul for each time step without `linear_before_reset`",
        "RNN": "as LSTM",
        "QLinearConv": "Conv with float weights; quantisation of its result on the node",
        "QLinearMatMul": "MatMul with float weights, likewise",
        "ConvInteger": "Conv with float weights, rounded on the node",
        "MatMulInteger": "MatMul with float weights, likewise",
        "DequantizeLinear": "of constants: float weights",
        "DynamicQuantizeLinear": "sample by sample, on the node",
        "Split": "Slice",
        "Concat": "of activations and constants: Pad and Add",
    }
)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Node tests of onnx that the server does not pass, for one reason.

    Attributes:
        reason: why, for docs/operators.md.
        tests: their names without "test_", or patterns of names. What follows a dash is the positions of the operands
            that are activations, where only that is left out.
    """

    reason: str
    tests: tuple[str, ...]


LEFT_OUT: Sequence[LeftOut] = (
    LeftOut(
        "arithmetic on integers runs on the node: only float32 is encrypted",
        ("add_*int*", "div_*int*", "mul_*int*", "sub_*int*"),
    ),
    LeftOut("interpolation runs on the node", ("resize_*_linear*", "resize_*_cubic*", "resize_tf_crop_and_resize*")),
    LeftOut("quantisation to the range of the data is not linear: it runs on the node", ("dynamicquantizelinear*",)),
    LeftOut(
        "Flatten to another axis than 1 merges the batch with other axes",
        ("flatten_axis[023]", "flatten_negative_axis[124]"),
    ),
    LeftOut(
        "the activation is a vector, and the batch none of the axes that MatMul broadcasts",
        ("matmul_1d_1d-1", "matmul_1d_3d-0", "matmul_4d_1d-1"),
    ),
    LeftOut(
        "tensors without elements are not encrypted, and no model's inputs",
        (
            "reduce_sum_empty_set*", "reshape_allowzero_reordered", "slice_start_out_of_bounds", "split_zero_size_*",
            "tri[lu]_zero",
        ),
    ),
    LeftOut("sequences and optionals are no tensors", ("identity_opt", "identity_sequence")),
    LeftOut("refused: training mode", ("batchnorm_*_training_mode",)),
    LeftOut(
        "refused: weights in an operator that the server lacks", ("*deform_conv_*", "causal_conv_with_state_*")
    ),
    LeftOut("refused: float16 scales; export in float32", ("qlinearmatmul_*_float16",)),
    LeftOut(
        "refused: onnxruntime lacks it (`layout` = 1, a zero point for every channel, 4-bit floats), so that the "
        "partition can't be compared with the original",
        ("*_batchwise", "convinteger_with_padding", "dequantizelinear_float4e2m1"),
    ),
)  # fmt: skip


def why_left_out(test: str) -> str | None:
    """Return why a node test of onnx is left out, None for one that is not.

    Args:
        test: its name without "test_", then a dash and the positions of its activations, with dashes between.
    """
    name = test.partition("-")[0]
    return next(
        (
            group.reason
            for group in LEFT_OUT
            for pattern in group.tests
            if fnmatchcase(test if "-" in pattern else name, pattern)
        ),
        None,
    )


def describe() -> str:
    """Return docs/operators.md."""
    return "\n".join([*_sections()]) + "\n"


def _sections() -> Iterator[str]:
    weighted = {name: rule.note for name, rule in RULES.items() if rule.weighted}
    free = {name: rule.note for name, rule in RULES.items() if not rule.weighted}
    yield _INTRODUCTION
    yield from ("", "## On the server, under encryption", "")
    yield from _table(("operator", "what"), weighted.items())
    yield _WEIGHTED
    yield from ("", "## On either side, wherever fewer values cross", "")
    yield from _table(("operator", "what"), free.items())
    yield _FREE
    yield from ("", "## Rewritten first", "")
    yield from _table(("operator", "becomes"), REWRITTEN.items())
    yield _REWRITTEN
    yield _ON_NODE
    yield from ("", "## Refused, all offenders in one error", "")
    lacking = f"- constant weights in {_listed(LACKING)}, where they can't be rewritten;"
    yield fill(lacking, 120, subsequent_indent="  ")
    yield _REFUSED
    yield from ("", "## What of onnx's own node tests is left out, and why", "")
    yield _NODE_TESTS
    yield from _table(("tests", "why"), ((_listed(f"`{t}`" for t in group.tests), group.reason) for group in LEFT_OUT))


def _table(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield f"| {head[0]} | {head[1]} |"
    yield "|---|---|"
    for operator, note in rows:
        yield f"| {operator} | {note} |"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


_INTRODUCTION = """# Operators

Anything that ONNX defines runs; the question is where. `heinfer partition` prints it, step by step. This page is made
from the code, by `make docs`."""

_WEIGHTED = """
Weights are float32 constants. Two weighted layers in a row are two blocks: the node decrypts and encrypts between them,
which is where the precision comes from. Independent blocks share a round trip; blocks that read the same value share an
upload. The batch may be anywhere in what they read, and merged with other axes: (T, samples, d) of a sequence-first
transformer, (samples * windows, tokens, d) of a Swin transformer."""

_FREE = """
Mul and Div by one number, and Einsum of one activation alone, belong here too. Constants that are added are biases, and
the node applies them. The partitioner finds the cheapest placement by a minimum cut ([placement.md](placement.md))."""

_REWRITTEN = """
Normalisations that an exporter has taken apart are one operator again, LayerNormalization or GroupNormalization. What
follows from shapes and constants alone is computed; what changes nothing is removed. A ConvTranspose that crops nothing
and the Conv behind it are one ConvTranspose; an AveragePool behind a 1x1 Conv moves in front of it; a stride with which
alone a value is read moves back to the Conv that makes it."""

_ON_NODE = """
## On the node, in the clear

Everything else without learned weights, under onnxruntime: Relu, Gelu, MaxPool, Softmax, LayerNormalization and other
normalisations with their gains, products of two activations, Gather of embeddings by token id, integer arithmetic."""

_REFUSED = f"""- If, Loop, Scan, SequenceMap; operators of custom domains; BatchNormalization in training mode;
- weights other than float32, weights that are computed from activations in part (a bias, a scale);
- a batch size fixed above 1, axes other than the batch that stay dynamic (`--dimension sequence=64` fixes one);
- models that mix samples, and models that onnxruntime itself does not run.

Opsets {OLDEST} to the newest that the installed `onnx` has; older ones than {OPSET} are converted to it. A batch size
of 1 becomes any; an input whose first axis is 1 for another reason, such as a mask of shape (1, T), becomes one for
each sample. Every partition is compared with the original under onnxruntime, three samples together against one by
one."""

_NODE_TESTS = """\
`tests/coverage/test_backend_cases.py` takes all tests of `onnx.backend.test` for the operators above, but not the
expanded forms of functions. It gives them a batch axis where they have none, places the operator under encryption, and
compares with the numbers that onnx expects. DequantizeLinear is taken at opset 25, the newest that onnxruntime has. A
number after a dash is the operand that is encrypted.
"""


if __name__ == "__main__":
    print(describe(), end="")
