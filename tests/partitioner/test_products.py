from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from heinfer.errors import UnsupportedModelError
from tests.partitioner.examples import check, graph, weights

#: Input without the batch axis, operands, constant.
MATMULS = {
    "a_matrix_a_head": ("2,3,7", "x, w", (2, 7, 5)),
    "a_matrix_a_head_leading_one": ("2,3,7", "x, w", (1, 2, 7, 5)),
    "a_matrix_a_head_on_the_left": ("2,7,3", "w, x", (2, 5, 7)),
    "two_stacks": ("2,3,4,7", "x, w", (2, 3, 7, 5)),
    "inner_stack": ("2,3,4,7", "x, w", (3, 7, 5)),
    "outer_stack": ("2,3,4,7", "x, w", (2, 1, 7, 5)),
    "activation_broadcasts": ("1,4,7", "x, w", (3, 7, 5)),
    "activation_broadcasts_outside": ("1,3,4,7", "x, w", (2, 3, 7, 5)),
    "one_row_a_head": ("3,1,7", "x, w", (3, 7, 5)),
}


@pytest.mark.parametrize("case", MATMULS)
def test_matmul_by_stacked_matrices_matches_onnxruntime(case: str, tmp_path: Path) -> None:
    source, operands, shape = MATMULS[case]
    model = graph(f"g (float[n,{source}] x) => (float y) {{ y = MatMul ({operands}) }}", {"w": weights(*shape)})
    found = check(model, tmp_path)
    assert found.on_server == [["MatMul"]]
    assert found.on_node == []


def test_matmul_with_a_matrix_a_sample_is_refused(tmp_path: Path) -> None:
    model = graph("g (float[n,3,7] x) => (float y) { y = MatMul (x, w) }", {"w": weights(3, 7, 5)})
    with pytest.raises(UnsupportedModelError):
        check(model, tmp_path)


EINSUMS = {
    "linear": ("7", "ni,ij->nj", (7, 5)),
    "linear_implicit": ("7", "ai,ib", (7, 5)),
    "transposed": ("7", "ni,ji->nj", (5, 7)),
    "tokens": ("4,7", "bti,ij->btj", (7, 5)),
    "tokens_turned": ("4,7", "bti,ij->bjt", (7, 5)),
    "heads": ("3,4,7", "bhti,hij->bhtj", (3, 7, 5)),
    "heads_apart": ("4,7", "btd,hdk->bhtk", (3, 7, 5)),
    "heads_joined": ("3,4,5", "bhtk,hkd->btd", (3, 5, 7)),
    "two_inputs": ("4,7", "bti,tij->bj", (4, 7, 5)),
    "elementwise": ("4,7", "bij,ij->bij", (4, 7)),
    "outer": ("4", "bi,j->bij", (5,)),
    "row_sums": ("4,7", "bij,i->bi", (4,)),
    "scalar": ("4,7", "bij,ij->b", (4, 7)),
    "diagonal_of_activation": ("5,5,2", "biik,kj->bij", (2, 3)),
    "diagonal_of_weights": ("4,5", "bti,ii->bti", (5, 5)),
    "sum_of_weights": ("4,5", "bti,ijk->btj", (5, 3, 2)),
    "ellipsis": ("2,4,7", "...i,ij->...j", (7, 5)),
    "ellipsis_implicit": ("2,4,7", "...i,ij", (7, 5)),
    "ellipsis_inside": ("2,4,7", "b...i,ij->bj...", (7, 5)),
}


def swapped(equation: str) -> str:
    terms, arrow, result = equation.partition("->")
    return ",".join(reversed(terms.split(","))) + arrow + result


@pytest.mark.parametrize("case", EINSUMS)
@pytest.mark.parametrize("operands", ["x, w", "w, x"])
def test_einsum_with_one_constant_matches_onnxruntime(case: str, operands: str, tmp_path: Path) -> None:
    source, equation, shape = EINSUMS[case]
    equation = equation if operands == "x, w" else swapped(equation)
    model = graph(
        f'g (float[n,{source}] x) => (float y) {{ y = Einsum <equation = "{equation}"> ({operands}) }}',
        {"w": weights(*shape)},
    )
    found = check(model, tmp_path)
    assert found.on_server == [["Einsum"]]
    assert found.on_node == []


@pytest.mark.parametrize("equation", ["bijk->bk", "bijk->bki", "bijk -> b", "bkii->bk", "bkii->bik", "...ii->..."])
def test_einsum_of_one_activation_follows_weights_on_the_server(equation: str, tmp_path: Path) -> None:
    model = graph(
        f'g (float[n,2,3,3] x) => (float y) {{ a = Mul (x, w) y = Einsum <equation = "{equation}"> (a) }}',
        {"w": weights(2, 3, 3)},
    )
    assert check(model, tmp_path).on_server == [["Mul", "Einsum"]]


def test_einsum_of_one_activation_that_sums_over_samples_runs_on_node(tmp_path: Path) -> None:
    model = graph(
        'g (float[n,3] x) => (float y, float z) { y = Mul (x, w) s = Einsum <equation = "ni->i"> (y) z = Sub (y, s) }',
        {"w": weights(3)},
    )
    with pytest.raises(UnsupportedModelError, match="mixes samples"):
        check(model, tmp_path)


def test_einsum_of_two_activations_runs_on_node(tmp_path: Path) -> None:
    model = graph(
        'g (float[n,4,7] x) => (float y) { a = MatMul (x, w) y = Einsum <equation = "bti,bsi->bts"> (a, a) }',
        {"w": weights(7, 5)},
    )
    found = check(model, tmp_path)
    assert found.on_server == [["MatMul"]]
    assert "Einsum" in found.node_operators


def test_einsum_that_sums_over_samples_is_refused(tmp_path: Path) -> None:
    model = graph('g (float[n,7] x) => (float y) { y = Einsum <equation = "ni,ni->i"> (x, w) }', {"w": weights(1, 7)})
    with pytest.raises(UnsupportedModelError):
        check(model, tmp_path)


def test_stacked_matmul_multiplies_no_more_than_in_the_clear(tmp_path: Path) -> None:
    model = graph("g (float[n,3,4,7] x) => (float y) { y = MatMul (x, w) }", {"w": weights(3, 7, 5)})
    (block,) = check(model, tmp_path).plan.blocks
    assert block.program.multiply_adds() == 3 * 4 * 7 * 5
    assert np.prod(block.outputs[0].shape) == 3 * 4 * 5
