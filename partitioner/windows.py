"""Geometry of sliding windows: auto_pad, explicit pads, strides, dilations, as the ONNX specification defines them."""

from __future__ import annotations

import onnx_ir as ir

from heinfer.operators.steps import Shape, Window


def padded_window(node: ir.Node, source: Shape, target: Shape, kernel: tuple[int, int]) -> Window:
    """Return the window of a Conv or pooling node over (C, H, W).

    Args:
        node: node with the attributes strides, dilations, pads, auto_pad.
        source: shape of its input per sample.
        target: shape of its output per sample, as onnx has inferred it.
        kernel: height and width.
    """
    strides = node.attributes.get_ints("strides", (1, 1))
    dilations = node.attributes.get_ints("dilations", (1, 1))
    pads = node.attributes.get_ints("pads", (0, 0, 0, 0))
    auto_pad = node.attributes.get_string("auto_pad", "NOTSET")
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        begin, end = [], []
        for i in range(2):
            reach = (target[1 + i] - 1) * strides[i] + (kernel[i] - 1) * dilations[i] + 1
            total = max(reach - source[1 + i], 0)
            small, large = total // 2, total - total // 2
            begin.append(small if auto_pad == "SAME_UPPER" else large)
            end.append(large if auto_pad == "SAME_UPPER" else small)
        pads = (*begin, *end)
    elif auto_pad == "VALID":
        pads = (0, 0, 0, 0)
    return Window(
        kernel,
        (strides[0], strides[1]),
        (pads[0], pads[1], pads[2], pads[3]),
        (dilations[0], dilations[1]),
        (target[1], target[2]),
    )
