"""Batch axes that exporters fix, move or merge with others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from heinfer.errors import UnsupportedModelError
from tests.partitioner.examples import check, graph, weights

torch = pytest.importorskip("torch")

nn = torch.nn

pytestmark = pytest.mark.usefixtures("operators_registered_once")


@pytest.fixture(autouse=True)
def _attention_by_operators() -> Iterator[None]:
    """Keep torch from a fused attention that its exporters lack."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def exported(
    make: Callable[[], torch.nn.Module], shape: tuple[int, ...], path: Path, dynamo: bool, symbolic: bool
) -> onnx.ModelProto:
    """Export a module by one of torch's two exporters, with a symbolic batch or one that is fixed at 1."""
    torch.manual_seed(0)
    module = make().eval()
    example = (torch.randn(2 if dynamo and symbolic else 1, *shape),)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the exporters deprecate each other
        if dynamo:
            shapes = ({0: torch.export.Dim("batch")},) if symbolic else None
            torch.onnx.export(module, example, path, dynamo=True, dynamic_shapes=shapes, verbose=False)
        else:
            axes = {"x": {0: "batch"}} if symbolic else None
            torch.onnx.export(module, example, path, dynamo=False, input_names=["x"], dynamic_axes=axes)
    return onnx.load_model(path)


class Views(nn.Module):
    """Flatten by x.size(0), heads by view and transpose, back by reshape."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, tokens, features = x.shape
        heads = self.inner(x).view(samples, tokens, 2, features // 2).transpose(1, 2)
        scores = torch.softmax(heads @ heads.transpose(-1, -2), -1) @ heads
        joined = scores.transpose(1, 2).contiguous().view(samples, tokens, features)
        return self.outer(joined.view(x.size(0), -1))


class ClassToken(nn.Module):
    """A class token expanded to the batch, position embeddings by position ids, the token's own result."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 8)), nn.Embedding(5, 8)
        self.patches, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), patches], 1)
        ids = torch.arange(tokens.shape[1]).expand(x.shape[0], -1)
        tokens = tokens + self.positions(ids)
        return self.head(torch.relu(tokens.mean(1) * tokens[:, 0]))


class Attention(nn.Module):
    """nn.MultiheadAttention over tokens that come with the batch first."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)
        self.batch_first = batch_first
        nn.init.normal_(self.attention.in_proj_bias)
        nn.init.normal_(self.attention.out_proj.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.batch_first:
            return self.attention(x, x, x, need_weights=False)[0]
        x = x.transpose(0, 1)
        return self.attention(x, x, x, need_weights=True)[0].transpose(0, 1)


class Windows(nn.Module):
    """Attention within windows, as in Swin: windows are merged with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.projection = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, height, width, features = x.shape
        windows = x.view(samples, height // 2, 2, width // 2, 2, features).permute(0, 1, 3, 2, 4, 5)
        windows = self.norm(windows.reshape(-1, 4, features))
        qkv = self.qkv(windows).reshape(windows.shape[0], 4, 3, 2, features // 2).permute(2, 0, 3, 1, 4)
        scores = torch.softmax(qkv[0] @ qkv[1].transpose(-2, -1) + self.bias, -1) @ qkv[2]
        windows = self.projection(scores.transpose(1, 2).reshape(windows.shape[0], 4, features))
        back = windows.view(samples, height // 2, width // 2, 2, 2, features).permute(0, 1, 3, 2, 4, 5)
        return back.reshape(samples, height, width, features)


class SequenceFirst(nn.Module):
    """Linear layers, a product with weights and a bias over (tokens, samples, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.gain = nn.Linear(6, 8), nn.Linear(8, 4), nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.first(x.transpose(0, 1)) * self.gain
        return self.second(torch.relu(tokens)).transpose(0, 1)


class Frames(nn.Module):
    """A convolution, normalisation and pooling over the frames of a video, merged with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(12, 3)
        nn.init.uniform_(self.norm.running_mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, frames = x.shape[:2]
        features = torch.relu(self.norm(self.conv(x.flatten(0, 1))))
        return self.head(features.mean((2, 3)).view(samples, frames * 4))


class Tiled(nn.Module):
    """Constants repeated for every sample, an axis tiled, a size taken from another value."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.mix = nn.Parameter(torch.randn(1, 3, 6)), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries = self.queries.repeat(x.shape[0], 1, 1)
        keys = self.mix(x).repeat(1, 2, 1)
        zeros = torch.zeros(x.shape[0], 3, keys.shape[1])
        return torch.softmax(queries @ keys.transpose(1, 2) + zeros, -1) @ keys


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "views": (Views, (4, 8)),
    "class token": (ClassToken, (3, 8, 8)),
    "attention": (lambda: Attention(True), (5, 8)),
    "sequence-first attention": (lambda: Attention(False), (5, 8)),
    "windows": (Windows, (4, 6, 8)),
    "sequence-first": (SequenceFirst, (5, 6)),
    "frames": (Frames, (3, 2, 4, 4)),
    "tiled": (Tiled, (4, 6)),
}


@pytest.mark.parametrize("symbolic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("case", MODULES)
def test_batch_of_module_exported_by_torchscript_is_freed(case: str, symbolic: bool, tmp_path: Path) -> None:
    make, shape = MODULES[case]
    found = check(exported(make, shape, tmp_path / "model.onnx", False, symbolic), tmp_path)
    assert found.plan.inputs[0].shape == shape
    assert not {"Gemm", "Conv"} & set(found.node_operators)  # MatMul of two activations stays


@pytest.mark.parametrize(
    ("case", "symbolic"),
    [("views", False), ("class token", True), ("sequence-first attention", True), ("windows", True), ("tiled", True)],
)
def test_batch_of_module_exported_by_dynamo_is_freed(case: str, symbolic: bool, tmp_path: Path) -> None:
    make, shape = MODULES[case]
    check(exported(make, shape, tmp_path / "model.onnx", True, symbolic), tmp_path)


BODIES: dict[str, tuple[str, str, dict[str, np.ndarray], list[list[str]]]] = {
    "rows of all samples": (
        "float[1,4,6] x",
        "a = Reshape (x, s) b = Gemm <alpha = 0.5, beta = 2.0, transB = 1> (a, w, c) y = Reshape (b, t)",
        {"w": weights(5, 6), "c": weights(5), "s": np.array([4, 6]), "t": np.array([1, 20])},
        [["MatMul", "Add"]],
    ),
    "a bias for every row": (
        "float[1,4,6] x",
        "a = Reshape (x, s) b = Gemm (a, w, c) y = Reshape (b, t)",
        {"w": weights(6, 5), "c": weights(4, 5), "s": np.array([4, 6]), "t": np.array([1, 20])},
        [["MatMul", "Add"]],
    ),
    "samples behind rows": (
        "float[n,4,6] x",
        "p = Transpose <perm = [1, 0, 2]> (x) a = Reshape (p, s) b = Gemm (a, w, c) d = Reshape (b, t)"
        " y = Transpose <perm = [1, 0, 2]> (d)",
        {"w": weights(6, 5), "c": weights(1, 5), "s": np.array([-1, 6]), "t": np.array([4, -1, 5])},
        [["MatMul", "Add"]],
    ),
    "features first": (
        "float[n,6] x",
        "a = Transpose (x) b = Gemm <transA = 1> (w, a, c) d = Relu (b) y = Transpose (d)",
        {"w": weights(6, 5), "c": weights(5, 1)},
        [["Gemm"]],
    ),
    "constant on the left": (
        "float[n,6,4] x",
        "a = Transpose <perm = [2, 1, 0]> (x) b = MatMul (w, a) y = Transpose <perm = [2, 1, 0]> (b)",
        {"w": weights(3, 6)},
        [["MatMul"]],
    ),
    "a matrix for every head": (
        "float[n,3,6] x",
        "a = Transpose <perm = [1, 0, 2]> (x) b = MatMul (a, w) y = Transpose <perm = [1, 0, 2]> (b)",
        {"w": weights(3, 6, 5)},
        [["Einsum"]],
    ),
    "a vector": (
        "float[n,3,6] x",
        "a = Transpose <perm = [1, 0, 2]> (x) b = MatMul (a, w) y = Transpose (b)",
        {"w": weights(6)},
        [["MatMul"]],
    ),
    "einsum": (
        "float[n,3,6] x",
        'a = Transpose <perm = [1, 0, 2]> (x) y = Einsum <equation = "tbd,de->bet"> (a, w)',
        {"w": weights(6, 5)},
        [["MatMul"]],
    ),
    "features in front of samples": (
        "float[n,3,6] x",
        "a = Transpose <perm = [1, 0, 2]> (x) b = Mul (a, g) d = Relu (b) e = Div (d, h)"
        " y = Transpose <perm = [1, 0, 2]> (e)",
        {"g": weights(6), "h": 1 + np.abs(weights(3, 1, 1))},
        [["Mul"], ["Div"]],
    ),
    "class token of integers": (
        "int64[1,4] x",
        "a = Concat <axis = 1> (k, x) b = Gather (e, a) d = MatMul (b, w) y = ReduceMean <axes = [1]> (d)",
        {"k": np.array([[2]]), "e": weights(9, 6), "w": weights(6, 5)},
        [["MatMul", "ReduceMean"]],
    ),
    "sampling grid": (
        "float[1,2,4,4] x",
        "a = GridSample (x, g) y = Conv (a, w)",
        {"g": np.random.default_rng(0).uniform(-1, 1, (1, 5, 3, 2)).astype(np.float32), "w": weights(3, 2, 2, 2)},
        [["Conv"]],
    ),
    "resize by sizes": (
        "float[1,2,4,4] x",
        'a = Resize <mode = "linear"> (x, , , z) y = Conv (a, w)',
        {"z": np.array([1, 2, 7, 5]), "w": weights(3, 2, 2, 2)},
        [["Conv"]],
    ),
    "squeeze without axes": (
        "float[n,2,4,4] x",
        "a = GlobalAveragePool (x) b = Squeeze (a) d = Reshape (b, s) y = Gemm (d, w)",
        {"s": np.array([1, 2]), "w": weights(2, 5)},
        [["GlobalAveragePool", "Squeeze", "Reshape", "Gemm"]],
    ),
    "expanded windows": (
        "float[1,4,6] x",
        "a = Reshape (x, s) u = Unsqueeze (a, one) b = Expand (u, e) d = ReduceSum <keepdims = 0> (b, one)"
        " f = MatMul (d, w) y = Reshape (f, t)",
        {
            "s": np.array([2, 12]),
            "one": np.array([1]),
            "e": np.array([2, 3, 12]),
            "t": np.array([1, 10]),
            "w": weights(12, 5),
        },
        [["MatMul"]],
    ),
    "transposed convolution of frames": (
        "float[1,3,2,4] x",
        "a = Reshape (x, s) b = ConvTranspose <strides = [2], pads = [1, 0]> (a, w, c) d = Relu (b) y = Reshape (d, t)",
        {"w": weights(2, 4, 3), "c": weights(4), "s": np.array([3, 2, 4]), "t": np.array([1, 3, 32])},
        [["ConvTranspose"]],
    ),
}


@pytest.mark.parametrize("case", BODIES)
def test_batch_that_is_fixed_or_elsewhere_is_freed(case: str, tmp_path: Path) -> None:
    inputs, body, constants, on_server = BODIES[case]
    model = graph(f"g ({inputs}) => (float y) {{ {body} }}", constants)
    found = check(model, tmp_path)
    assert [sorted(set(names) & WEIGHTED_OR_SUM) for names in found.on_server] == [
        sorted(set(names) & WEIGHTED_OR_SUM) for names in on_server
    ]


WEIGHTED_OR_SUM = {"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "Mul", "Div"}


def test_products_of_one_value_share_its_turned_form(tmp_path: Path) -> None:
    model = graph(
        "g (float[n,3,6] x) => (float y) { a = Transpose <perm = [1, 0, 2]> (x) q = MatMul (a, u) k = MatMul (a, v)"
        " p = Mul (q, k) y = Transpose <perm = [1, 0, 2]> (p) }",
        {"u": weights(6, 5), "v": weights(6, 5, seed=1)},
    )
    found = check(model, tmp_path)
    assert len(found.rounds) == 1
    assert len({t.name for block in found.plan.blocks for t in block.inputs}) == 1


@pytest.mark.parametrize(
    "body",
    [
        "b = ReduceMean <axes = [0], keepdims = 1> (a) y = Sub (a, b)",
        "y = Reshape (a, half)",
        "t = Transpose (a) b = Reshape (t, whole) y = Reshape (b, whole)",
    ],
    ids=["mean over the batch", "halves of samples become samples", "samples interleaved"],
)
def test_partition_of_model_that_moves_samples_is_refused(body: str, tmp_path: Path) -> None:
    model = graph(
        f"g (float[n,6] x) => (float y) {{ a = MatMul (x, w) {body} }}",
        {"w": weights(6, 4), "half": np.array([-1, 2]), "whole": np.array([-1, 4])},
    )
    with pytest.raises(UnsupportedModelError):
        check(model, tmp_path)
