"""`--device` of both parties: queries through PyTorch are answered and checked, and what can't be done is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch (the extra [train])")

from heinfer.client import connect  # noqa: E402
from heinfer.plan.execution import open_session  # noqa: E402
from heinfer.processes import child_environment  # noqa: E402
from tests.interfaces.small_node import small_node  # noqa: E402
from tests.parties import REPOSITORY, refusal  # noqa: E402
from trusted_node.modes import ModeChoice  # noqa: E402

ANYWHERE = "127.0.0.1:0"
GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("mode", [ModeChoice.PREPARED, ModeChoice.STANDARD])
def test_queries_through_a_device_are_the_models_answers(dense_bundle: Path, device: str, mode: ModeChoice) -> None:
    session = open_session((dense_bundle.parent / "dense.onnx").read_bytes())
    x = np.random.default_rng(0).standard_normal((3, *session.get_inputs()[0].shape[1:])).astype(np.float32)
    (want,) = session.run(None, {session.get_inputs()[0].name: x})
    with small_node(dense_bundle, mode=mode, device=device) as parties, connect(str(parties.node.address)) as model:
        assert np.abs(model.predict(x) - want).max() < 2e-2


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--device", "gpu"), "--device: expected native, cpu, cuda or cuda:0"),
        (("--device", "cuda:99"), "expected a GPU that PyTorch can use"),
        (("--device-memory", "1GiB"), "--device-memory goes with --device"),
        (("--device", "cpu", "--device-memory", "0.1KiB"), "expected at most 102 bytes of weights and hints"),
    ],
)
def test_device_that_cannot_be_used_is_refused_in_one_line(
    dense_bundle: Path, words: tuple[str, ...], reason: str
) -> None:
    assert reason in refusal("serve", dense_bundle / "server", "--listen", ANYWHERE, *words)
    if (
        words[0] == "--device" and len(words) == 2
    ):  # the node says the same; its memory is needed once a server is there
        node = ("node", dense_bundle / "node", "--server", "127.0.0.1:9", "--listen", ANYWHERE)
        assert reason in refusal(*node, *words)


def test_native_backend_does_not_import_torch() -> None:
    program = (
        "import sys; from heinfer.operators.backends import backend_on, open_device; import heinfer.server.service; "
        "import trusted_node.preparation; backend_on(open_device('native')); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, cwd=REPOSITORY, env=child_environment()
    )
    assert done.stdout.strip() == b"False"
