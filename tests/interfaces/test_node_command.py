"""`heinfer serve` and `heinfer node` with several models and ways in, as processes of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from heinfer.cli.main import app
from heinfer.client import connect
from heinfer.errors import HeinferError
from heinfer.processes import child_environment
from partitioner import partition
from tests.parties import REPOSITORY, Process, command, refusal, start
from tests.small_models import dense_model

X = np.ones((2, 3), np.float32)
ANYWHERE = "127.0.0.1:0"


@dataclass(frozen=True)
class Running:
    """Bundles, and processes that serve both."""

    bundles: dict[str, Path]
    server: Process
    node: Process


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("command")
    bundles = {}
    for seed, name in enumerate(("first", "second")):
        partition(dense_model(folder / f"{name}.onnx", seed=seed), folder / name)
        bundles[name] = folder / name
    servers = [str(bundle / "server") for bundle in bundles.values()]
    nodes = [str(bundles["first"] / "node"), f"other={bundles['second'] / 'node'}"]
    with (
        start(folder / "server.log", "serve", *servers, "--listen", ANYWHERE, "--metrics", ANYWHERE) as server,
        start(
            folder / "node.log", "node", *nodes, "--server", server.address, "--listen", ANYWHERE,
            "--http", ANYWHERE, "--grpc", ANYWHERE, "--page", "--metrics", "--prepared", "1", "--max-delay", "1ms",
        ) as node,
    ):  # fmt: skip
        yield Running(bundles, server, node)


def test_all_addresses_are_said_to_the_parent(running: Running) -> None:
    assert set(running.node.addresses) == {"listening", "http", "grpc"}
    assert set(running.server.addresses) == {"listening", "metrics"}
    assert len({*running.node.addresses.values(), *running.server.addresses.values()}) == 5


def test_infer_asks_for_a_model_by_its_name(running: Running, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    results = {}
    for name in ("", "first", "other"):
        words = ("--model-name", name) if name else ()
        done = command("infer", "--node", running.node.address, *words, tmp_path / "x.npy", "-o", tmp_path / "y.npy")
        assert done.code == 0, done.err
        results[name] = np.load(tmp_path / "y.npy")
    assert np.abs(results[""] - results["first"]).max() < 2e-2
    assert np.abs(results["other"] - results["first"]).max() > 0.1
    words = ("--node", running.node.address, "--model-name", "second")
    assert "expected one of ['first', 'other']" in refusal("infer", *words, tmp_path / "x.npy")


def test_page_metrics_and_models_are_served_over_http(running: Running) -> None:
    base = f"http://{running.node.addresses['http']}"
    with connect(running.node.address) as model:
        model.predict(X)
    with httpx.Client() as client:
        assert client.get(f"{base}/v2/health/ready").status_code == 200
        names = [entry["name"] for entry in client.post(f"{base}/v2/repository/index").json()]
        assert names == ["first", "other"]
        assert 'heinfer_node_queries_total{channel="frames",mode="prepared",model="first",outcome="ok"}' in (
            client.get(f"{base}/metrics").text
        )
        assert "heinfer_server_requests_total" in client.get(f"http://{running.server.addresses['metrics']}").text
        assert client.get(f"{base}/").headers["content-type"].startswith("text/html")


def test_model_is_unloaded_and_loaded_while_the_node_runs(running: Running) -> None:
    base = f"http://{running.node.addresses['http']}/v2/repository/models"
    with httpx.Client(timeout=30) as client, connect(running.node.address, model="other") as model:
        assert client.post(f"{base}/other/unload").status_code == 200
        with pytest.raises(Exception, match="not ready"):
            model.predict(X)
        with connect(running.node.address, model="first") as first:
            first.predict(X)
        assert client.post(f"{base}/other/load").status_code == 200
        model.predict(X)


def refused(*words: object) -> str:
    """Run a command in this process, which is refused before it does anything; return the reason."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(result.exception, HeinferError), result
    return str(result.exception)


def test_models_of_one_name_are_refused_with_the_remedy(running: Running) -> None:
    folder = running.bundles["first"] / "node"
    assert "give one another name, as in first-2=" in refused("node", folder, folder, "--server", ANYWHERE)


@pytest.mark.parametrize("option", ["--http", "--grpc"])
def test_further_ways_in_are_refused_beyond_loopback_as_frames_are(running: Running, option: str) -> None:
    words = ("node", running.bundles["first"] / "node", "--server", ANYWHERE, option, "0.0.0.0:0")
    assert "plain text" in refused(*words)
    assert "token" in refused(*words, "--client-insecure-plain-text")


@pytest.mark.parametrize("words", [("--page",), ("--metrics",), ("--page-host", "a.example"), ("--trace-server",)])
def test_options_that_need_others_are_usage_errors(running: Running, words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, ["node", str(running.bundles["first"] / "node"), "--server", ANYWHERE, *words])
    assert done.exit_code == 2, done


WITHOUT_EXTRAS = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("starlette", "uvicorn", "grpc", "prometheus_client", "opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
sys.argv = ["heinfer", *sys.argv[1:]]
from heinfer.cli.main import main
main()
"""


def without_extras(*words: object) -> subprocess.CompletedProcess[str]:
    """Run `heinfer ...` where the extras are not installed; standard input is closed, so that roles end at once."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, *map(str, words)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, cwd=REPOSITORY, env=child_environment(),
    )  # fmt: skip


def test_node_without_the_extra_answers_frames_and_says_what_the_rest_needs(running: Running) -> None:
    words = ("node", running.bundles["first"] / "node", "--server", running.server.address, "--listen", ANYWHERE)
    plain = without_extras(*words, "--prepared", 0, "--with-parent")
    assert plain.returncode == 0, plain.stderr
    assert '"listening"' in plain.stdout
    server = ("serve", running.bundles["first"] / "server", "--listen", ANYWHERE)
    further = [(*words, "--http", ANYWHERE), (*words, "--grpc", ANYWHERE), (*server, "--metrics", ANYWHERE)]
    for more in further:
        done = without_extras(*more)
        assert done.returncode == 1
        assert "pip install 'heinfer[serve]'" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
