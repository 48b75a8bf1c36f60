"""Preparation on a device of PyTorch gives the bits of the native one, and leaves nothing secret there."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch (the extra [train])")

from heinfer.errors import InputError, ParameterError  # noqa: E402
from heinfer.operators import HintKind  # noqa: E402
from heinfer.operators.torch_device import TorchDevice  # noqa: E402
from heinfer.plan import NodeBundle, load_node  # noqa: E402
from heinfer.ring import RingParameters  # noqa: E402
from partitioner import partition  # noqa: E402
from tests.partitioner.examples import graph  # noqa: E402
from tests.small_models import convolution_model  # noqa: E402
from tests.trusted_node.test_preparation import MODELS  # noqa: E402
from trusted_node import device_products, preparation  # noqa: E402
from trusted_node.device_products import DeviceTransform, SecretMemory  # noqa: E402
from trusted_node.preparation import PreparedQuery, Preparer  # noqa: E402

NAMES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that PyTorch can use")),
]
PARAMETERS = RingParameters.default()
#: One sample, several prepared one by one, a full group and a part of one; and coefficients in memory at a time.
SAMPLES = ((1, 1 << 23), (3, 1), (10, 1 << 23))
#: Models with hints of every kind, and one with steps after the weights.
KINDS = pytest.mark.parametrize("node", ["two blocks", "dense", "elementwise", "branches"], indirect=True)


@pytest.fixture(scope="module", params=[*MODELS, "two blocks"])
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NodeBundle:
    folder = tmp_path_factory.mktemp("device")
    if request.param == "two blocks":
        convolution_model(folder / "model.onnx")
    else:
        text, constants, _, _ = MODELS[request.param]
        onnx.save(graph(text, constants), folder / "model.onnx")
    partition(folder / "model.onnx", folder / "bundle")
    return load_node(folder / "bundle" / "node")


@pytest.fixture
def repeatable() -> Iterator[None]:
    """Let every preparation draw the same secrets and noise."""
    with patch.object(preparation, "draw_ternary", _ternary), patch.object(preparation, "draw_noise", _noise):
        yield


def _ternary(count: int, degree: int) -> np.ndarray:
    return np.random.default_rng(count * degree).integers(-1, 2, (count, degree)).astype(np.int8)


def _noise(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(-21, 22, count).astype(np.int8)


def contents(query: PreparedQuery, blocks: int) -> list[np.ndarray]:
    return [array for block in range(blocks) for array in query.material(block)]


@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("samples", "piece"), SAMPLES)
def test_prepared_queries_equal_native_ones_bit_for_bit(node: NodeBundle, name: str, samples: int, piece: int) -> None:
    blocks = len(node.plan.blocks)
    want = contents(Preparer(node).prepare(samples), blocks)
    preparer = Preparer(node, TorchDevice(name))
    with patch.object(device_products, "_PIECE", piece):
        found = contents(preparer.prepare(samples), blocks)
    for got, expected in zip(found, want, strict=True):
        np.testing.assert_array_equal(got, expected)
    for material in preparer.materials:  # what lies on the device does not lie here too
        assert material.on_device is not None
        assert material.public.size == 0
        kept = [data.size > 0 for data in material.hints]
        assert kept == [hint.kind is HintKind.ELEMENTWISE for hint in material.form.hints]


@KINDS
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("samples", [1, 10])
def test_what_held_secrets_on_the_device_is_zero_afterwards(node: NodeBundle, name: str, samples: int) -> None:
    preparer, lent = Preparer(node, TorchDevice(name)), []
    lend = SecretMemory.lend

    def note(memory: SecretMemory, *shape: int, kind: torch.dtype = torch.int64) -> torch.Tensor:
        lent.append(lend(memory, *shape, kind=kind))
        return lent[-1]

    with patch.object(SecretMemory, "lend", note):
        preparer.prepare(samples)
        assert lent
        assert not any(tensor.any() for tensor in lent)
        lent.clear()
        with patch.object(SecretMemory, "wipe", lambda memory: None):
            preparer.prepare(samples)
    assert any(tensor.any() for tensor in lent)  # the check above can fail


@KINDS
@pytest.mark.parametrize("name", NAMES)
def test_a_failure_on_the_device_wipes_there_and_here(node: NodeBundle, name: str) -> None:
    preparer, lent, made = Preparer(node, TorchDevice(name)), [], []
    lend, take = SecretMemory.lend, preparation.PreparedQuery.__init__

    def note(memory: SecretMemory, *shape: int, kind: torch.dtype = torch.int64) -> torch.Tensor:
        lent.append(lend(memory, *shape, kind=kind))
        return lent[-1]

    def keep(query: PreparedQuery, *arguments: object) -> None:
        take(query, *arguments)
        made.append([array for block in range(len(node.plan.blocks)) for array in query.material(block)])

    right = DeviceTransform.multiply

    def gone(*arguments: object) -> torch.Tensor:
        right(*arguments)
        raise RuntimeError("the device is gone")

    with (
        patch.object(SecretMemory, "lend", note),
        patch.object(preparation.PreparedQuery, "__init__", keep),
        patch.object(DeviceTransform, "multiply", gone),
        pytest.raises(RuntimeError, match="is gone"),
    ):
        preparer.prepare(2)
    assert lent
    assert not any(tensor.any() for tensor in lent)
    assert not any(array.any() for array in made[0])


@KINDS
@pytest.mark.parametrize("name", NAMES)
def test_no_tensor_outside_secret_memory_is_as_large_as_a_product(node: NodeBundle, name: str) -> None:
    """Intermediate results must be lent too, or they would stay in memory unwiped: PyTorch is asked what it makes."""
    preparer = Preparer(node, TorchDevice(name))
    seen: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            made = function(*args, **(kwargs or {}))
            fresh = isinstance(made, torch.Tensor) and not (kwargs or {}).get("out") is not None
            if fresh and not any(isinstance(a, torch.Tensor) and _shares(a, made) for a in args):
                seen.append(str(function))
            return made

    with Watch():
        preparer.prepare(1, threads=1)
    assert set(seen) <= {"aten.empty.memory_format", "aten.arange.start", "aten.arange.default", *PUBLIC}, set(seen)
    assert "aten.empty.memory_format" in seen
    gc.collect()


#: Sums and products of public numbers: where a hint's rows are written to.
PUBLIC = ("aten.mul.Tensor", "aten.add.Tensor")


def _shares(left: torch.Tensor, right: torch.Tensor) -> bool:
    return bool(left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr())


@pytest.mark.parametrize("name", NAMES)
def test_transform_that_is_not_exact_is_refused(name: str) -> None:
    device = TorchDevice(name)
    DeviceTransform(device, PARAMETERS)
    right = DeviceTransform.multiply_in_place

    def wrong(transform: DeviceTransform, x: torch.Tensor, *arguments: object) -> None:
        right(transform, x, *arguments)
        x[..., :1].bitwise_xor_(1)

    with (
        patch.object(DeviceTransform, "multiply_in_place", wrong),
        pytest.raises(ParameterError, match=r"self-test of .* exact transforms"),
    ):
        DeviceTransform(device, PARAMETERS)


@pytest.mark.parametrize("name", NAMES)
def test_hints_above_the_bound_on_memory_are_refused(name: str, dense_bundle: Path) -> None:
    loaded, device = load_node(dense_bundle / "node"), TorchDevice(name)
    preparer = Preparer(loaded, device)
    size = device.kept_bytes
    assert preparer.materials
    assert size > 0
    Preparer(loaded, TorchDevice(name, size))
    with pytest.raises(InputError, match="--device-memory"):
        Preparer(loaded, TorchDevice(name, size - 1))
