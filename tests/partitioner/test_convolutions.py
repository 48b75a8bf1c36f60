from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from heinfer.errors import UnsupportedModelError
from tests.partitioner.examples import check, graph, weights

#: Input without the batch axis, attributes, kernel.
CONVOLUTIONS = {
    "1d": ("3,9", "", (4, 3, 3)),
    "1d_strides_pads": ("3,9", "strides = [2], pads = [2, 1]", (4, 3, 3)),
    "1d_dilations": ("3,9", "dilations = [3], pads = [3, 3]", (4, 3, 3)),
    "1d_depthwise": ("3,9", "group = 3, pads = [0, 2]", (6, 1, 4)),
    "1d_groups": ("4,9", "group = 2", (6, 2, 3)),
    "1d_same": ("3,9", 'auto_pad = "SAME_LOWER", strides = [2]', (4, 3, 4)),
    "1d_whole": ("3,9", "", (4, 3, 9)),
    "3d": ("2,4,5,6", "", (3, 2, 2, 3, 3)),
    "3d_pads": ("2,4,5,6", "pads = [1, 0, 2, 0, 1, 1]", (3, 2, 3, 3, 2)),
    "3d_strides": ("2,5,6,7", "strides = [2, 2, 3], pads = [1, 1, 1, 1, 1, 1]", (3, 2, 3, 3, 3)),
    "3d_odd_strides": ("2,7,6,7", "strides = [3, 3, 2], pads = [2, 0, 1, 1, 2, 1]", (3, 2, 4, 2, 3)),
    "3d_dilations": ("2,6,6,6", "dilations = [2, 2, 1]", (3, 2, 3, 2, 2)),
    "3d_dilated_strides": (
        "2,7,6,6",
        "dilations = [3, 1, 2], strides = [2, 1, 2], pads = [1, 0, 0, 2, 1, 1]",
        (3, 2, 3, 2, 2),
    ),
    "3d_depthwise": ("2,4,5,6", "group = 2", (4, 1, 2, 3, 3)),
    "3d_point": ("2,4,5,6", "", (3, 2, 1, 1, 1)),
    "3d_one_slice": ("2,4,5,6", "pads = [0, 1, 1, 0, 1, 1]", (3, 2, 1, 3, 3)),
    "3d_whole": ("2,3,4,5", "", (3, 2, 3, 4, 5)),
    "3d_same": ("2,5,5,6", 'auto_pad = "SAME_UPPER", strides = [2, 1, 2]', (3, 2, 2, 3, 3)),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_conv_over_one_or_three_axes_matches_onnxruntime(case: str, bias: bool, tmp_path: Path) -> None:
    source, attributes, kernel = CONVOLUTIONS[case]
    constants = {"w": weights(*kernel)} | ({"b": weights(kernel[0])} if bias else {})
    call = f"Conv <{attributes}>" if attributes else "Conv"
    model = graph(f"g (float[n,{source}] x) => (float y) {{ y = {call} ({', '.join(['x', *constants])}) }}", constants)
    found = check(model, tmp_path)
    assert found.on_server == [["Conv"]]
    assert found.on_node == []
    assert found.plan.has_prepared_mode


TRANSPOSED = {
    "1d": ("3,7", "", (3, 4, 3)),
    "1d_strides": ("3,7", "strides = [3]", (3, 4, 4)),
    "1d_everything": (
        "4,7",
        "strides = [2], pads = [1, 2], output_padding = [1], dilations = [2], group = 2",
        (4, 3, 3),
    ),
    "2d": ("3,5,4", "", (3, 4, 2, 3)),
    "2d_doubles": ("3,5,4", "strides = [2, 2]", (3, 4, 2, 2)),
    "2d_unet": ("3,5,4", "strides = [2, 2], pads = [1, 1, 1, 1], output_padding = [1, 1]", (3, 4, 3, 3)),
    "2d_kernel_below_stride": ("3,5,4", "strides = [3, 2]", (3, 4, 2, 1)),
    "2d_dilations": ("3,5,4", "strides = [2, 3], dilations = [3, 2], pads = [0, 2, 1, 0]", (3, 4, 2, 3)),
    "2d_depthwise": ("3,5,4", "strides = [2, 2], group = 3", (3, 2, 4, 4)),
    "2d_groups": ("4,5,4", "strides = [2, 1], group = 2, pads = [1, 0, 0, 1]", (4, 3, 3, 2)),
    "2d_crops_much": ("3,5,4", "strides = [2, 2], pads = [4, 3, 3, 2]", (3, 4, 3, 4)),
    "2d_output_shape": ("3,5,4", "strides = [2, 2], output_shape = [9, 9]", (3, 4, 3, 3)),
    "2d_same_upper": ("3,5,4", 'strides = [2, 2], auto_pad = "SAME_UPPER"', (3, 4, 3, 3)),
    "2d_same_lower": ("3,5,4", 'strides = [2, 2], auto_pad = "SAME_LOWER"', (3, 4, 3, 3)),
    "2d_valid": ("3,5,4", 'strides = [2, 2], auto_pad = "VALID"', (3, 4, 3, 3)),
    "3d": ("2,3,4,3", "strides = [2, 1, 2], pads = [1, 0, 0, 0, 1, 1]", (2, 3, 3, 2, 2)),
    "3d_everything": (
        "4,3,2,3",
        "strides = [2, 2, 1], dilations = [1, 2, 2], output_padding = [1, 0, 0], group = 2, pads = [0, 1, 1, 1, 0, 1]",
        (4, 1, 3, 2, 2),
    ),
}


@pytest.mark.parametrize("case", TRANSPOSED)
@pytest.mark.parametrize("bias", [True, False])
def test_conv_transpose_matches_onnxruntime(case: str, bias: bool, tmp_path: Path) -> None:
    source, attributes, kernel = TRANSPOSED[case]
    group = 2 if "group = 2" in attributes else 3 if "group = 3" in attributes else 1
    constants = {"w": weights(*kernel)} | ({"b": weights(kernel[1] * group)} if bias else {})
    call = f"ConvTranspose <{attributes}>" if attributes else "ConvTranspose"
    model = graph(f"g (float[n,{source}] x) => (float y) {{ y = {call} ({', '.join(['x', *constants])}) }}", constants)
    found = check(model, tmp_path)
    assert found.on_server == [["ConvTranspose"]]
    assert found.on_node == []
    assert found.plan.has_prepared_mode


def test_conv_transpose_costs_no_more_than_in_the_clear(tmp_path: Path) -> None:
    model = graph(
        "g (float[n,3,5,4] x) => (float y) { y = ConvTranspose <strides = [2, 2]> (x, w) }", {"w": weights(3, 4, 2, 2)}
    )
    (block,) = check(model, tmp_path).plan.blocks
    assert block.program.multiply_adds() == 5 * 4 * 3 * 4 * 2 * 2


def test_conv_over_four_axes_is_refused_with_its_reason(tmp_path: Path) -> None:
    model = graph("g (float[n,2,3,3,3,3] x) => (float y) { y = Conv (x, w) }", {"w": weights(2, 2, 2, 2, 2, 2)})
    with pytest.raises(UnsupportedModelError, match="1 to 3 spatial axes, found 4"):
        check(model, tmp_path)


def test_convolution_of_large_planes_in_bands_shares_no_coefficient(tmp_path: Path) -> None:
    model = graph(
        "g (float[n,1,6,40,60] x) => (float y) { y = Conv <pads = [1, 1, 1, 1, 1, 1]> (x, w) }",
        {"w": weights(2, 1, 3, 3, 3)},
    )
    found = check(model, tmp_path)
    assert found.plan.has_prepared_mode
    assert np.prod(found.plan.blocks[0].outputs[0].shape) == 2 * 6 * 40 * 60
