"""The node's page without a browser: its document, what it answers, and whom it refuses."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request

from heinfer.errors import HeinferError, InputError, IntegrityError, RemoteProtocolError
from heinfer.plan import TensorSpec
from heinfer.ring import unpack
from heinfer.wire import TokenFile, make_token, token_line
from partitioner import partition
from tests.interfaces.fakes import FakeModel, FakeModels, digit_answer, expected, fake_models, fake_plan
from tests.interfaces.page_serving import Current, page_of
from tests.interfaces.small_node import MODEL, SmallNode, small_node
from tests.small_models import dense_model
from trusted_node.engine import DataError
from trusted_node.modes import ModeChoice
from trusted_node.serving import page_view
from trusted_node.serving.interface import (
    Channel,
    DeadlineError,
    ModelNotReadyError,
    Models,
    ModelState,
    QueueFullError,
)
from trusted_node.serving.limits import ServingLimits
from trusted_node.serving.page import document, page_routes
from trusted_node.serving.page_guard import PageGuard, Refusal
from trusted_node.serving.page_query import PageQuery, read_npy

DIGIT = TensorSpec("x", (1, 28, 28))
PIXELS = [i % 256 / 255 for i in range(784)]


@contextmanager
def served(
    models: Models, tokens: TokenFile | None = None, limits: ServingLimits | None = None
) -> Iterator[httpx.Client]:
    """Serve the page over real sockets; the client sends what the page's script sends."""
    with page_of(models, tokens, limits) as origin, script_of(origin) as client:
        yield client


def script_of(origin: str) -> httpx.Client:
    return httpx.Client(base_url=origin, headers={"Origin": origin, "Sec-Fetch-Site": "same-origin"})


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Current, str]]:
    """One server for all fake models, and its origin."""
    current = Current(fake_models())
    with page_of(current) as origin:
        yield current, origin


@pytest.fixture
def models(server: tuple[Current, str]) -> FakeModels:
    fresh = fake_models()
    server[0].models = fresh
    return fresh


@pytest.fixture
def client(server: tuple[Current, str], models: FakeModels) -> Iterator[httpx.Client]:
    with script_of(server[1]) as found:
        yield found


def ask(client: httpx.Client, data: Any, model: str = "digits", **headers: str) -> httpx.Response:
    return client.post("/page/infer", json={"model": model, "data": data}, headers=headers)


def npy(array: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    return file.getvalue()


# --- the document


def test_document_any_visitor_gets_one_page_that_nothing_can_be_added_to(client: httpx.Client) -> None:
    found = client.get("/")
    assert found.status_code == 200
    assert found.headers["content-type"] == "text/html; charset=utf-8"
    assert found.headers["x-content-type-options"] == "nosniff"
    assert found.headers["referrer-policy"] == "no-referrer"
    assert found.headers["cache-control"] == "no-store"
    policy = dict(part.strip().split(" ", 1) for part in found.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in found.headers["content-security-policy"]
    for tag in ("script", "style"):
        inside = re.findall(rf"<{tag}>(.*?)</{tag}>", found.text, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inside]
        assert [f"'sha256-{digest}'" for digest in digests] == [policy[f"{tag}-src"]]


def test_document_text_has_no_handlers_styles_storage_or_addresses() -> None:
    text = document()[0].decode()
    assert not re.search(r"<[^>]+\s(on\w+|style)\s*=", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function", text)
    assert not re.search(r"localStorage|sessionStorage|indexedDB|document\.cookie", text)
    assert set(re.findall(r"https?://[^\s'\"]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"(?:src|href)=\"(?!#|data:)", text)
    assert "{{" not in text


# --- what the node is doing


def test_status_loaded_and_unloaded_models_as_they_are(models: FakeModels, client: httpx.Client) -> None:
    models["mixed"].state = ModelState.UNAVAILABLE
    found = client.get("/page/status").json()
    by_name = {model["name"]: model for model in found["models"]}
    digits, mixed = by_name["digits"], by_name["mixed"]
    assert not found["ready"]
    assert digits["drawn"]
    assert digits["inputs"] == [{"name": "x", "shape": [1, 28, 28], "dtype": "float32"}]
    now = digits["status"]
    assert (now["pool_ready"], now["pool_size"], now["hints_days_left"]) == (12, 16, 29.5)
    assert (now["median_ms"], now["p95_ms"]) == (5.5, 5.95)
    assert [server["conduct"] for server in now["servers"]] == ["healthy"]
    assert mixed["state"] == "UNAVAILABLE"
    assert "status" not in mixed


def test_status_without_a_query_yet_has_no_latencies(models: FakeModels, client: httpx.Client) -> None:
    models["digits"].latencies_ms = ()
    (now,) = (m["status"] for m in client.get("/page/status").json()["models"] if m["name"] == "digits")
    assert now["latencies_ms"] == []
    assert now["median_ms"] is None
    assert now["p95_ms"] is None


@pytest.mark.parametrize(
    ("card", "epsilon", "said"),
    [
        ({"epsilon": 2.93, "delta": 1e-5, "adjacency": "add-or-remove-one", "accuracy": 0.98}, 2.93, "epsilon = 2.930"),
        ({"epsilon": None, "accuracy": float("nan"), "dataset": 7}, None, "no differential privacy"),
        ({"epsilon": float("inf"), "delta": 1e-5}, None, "no differential privacy"),
        ({"epsilon": True, "delta": "<b>", "classes": "x" * 10}, None, "no differential privacy"),
    ],
)
def test_status_cards_of_any_form_are_told_without_promises_they_do_not_make(
    card: dict[str, Any], epsilon: float | None, said: str
) -> None:
    models = FakeModels(FakeModel(fake_plan("m", [DIGIT], [TensorSpec("y", (10,))]), digit_answer, card=card))
    found = page_view.status(models, 1.0)["models"][0]["card"]
    assert found["epsilon"] == epsilon
    assert said in found["line"]
    json.dumps(found, allow_nan=False)


# --- queries


def test_infer_numbers_give_the_models_result_and_its_softmax(models: FakeModels, client: httpx.Client) -> None:
    found = ask(client, PIXELS).json()
    wanted = expected(np.array(PIXELS, np.float32).reshape(1, 1, 28, 28))[0]
    (output,) = found["outputs"]
    assert output["values"] == pytest.approx(wanted, rel=1e-6)
    powers = np.exp(wanted.astype(np.float64) - wanted.max())
    assert output["shares_are"] == "softmax"
    assert output["shares"] == pytest.approx(powers / powers.sum(), abs=1e-6)
    assert output["labels"] == [str(i) for i in range(10)]
    assert sum(found["node"]["histogram"]) == 784
    assert found["times_ms"]["total"] > 0
    assert found["times_ms"]["node"] == 1  # what the fake says of itself
    (query,) = models["digits"].submitted
    assert query.channel is Channel.PAGE
    assert query.watch is not None


def test_infer_probabilities_are_shown_as_they_are_with_the_cards_names() -> None:
    shares = np.array([[0.25, 0.75]], np.float32)
    plan = fake_plan("m", [DIGIT], [TensorSpec("y", (2,))])
    models = FakeModels(FakeModel(plan, lambda _: {"y": shares}, card={"classes": ["cat", "dog"]}))
    with served(models) as client:
        (output,) = ask(client, PIXELS, "m").json()["outputs"]
    assert output["shares_are"] == "probabilities"
    assert output["shares"] == [0.25, 0.75]
    assert output["labels"] == ["cat", "dog"]


def test_infer_random_values_fit_every_type(models: FakeModels, client: httpx.Client) -> None:
    found = ask(client, "random", "mixed")
    assert found.status_code == 200
    assert len(found.json()["outputs"]) == len(models["mixed"].plan.inputs)


def test_infer_npy_file_is_what_is_asked(models: FakeModels, client: httpx.Client) -> None:
    image = np.random.default_rng(0).random((1, 28, 28))
    found = ask(client, {"npy": base64.b64encode(npy(image)).decode()})
    assert found.status_code == 200
    np.testing.assert_array_equal(models["digits"].submitted[0].inputs["x"], image.astype(np.float32)[None])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b'{"model": "digits"}', "keys"),
        (b'{"model": 7, "data": []}', "keys"),
        (b'{"model": "digits", "data": [1, 2]}', "784 numbers"),
        (json.dumps({"model": "digits", "data": [*PIXELS[1:], "1"]}).encode(), "numbers only"),
        (json.dumps({"model": "digits", "data": [*PIXELS[1:], True]}).encode(), "numbers only"),
        (json.dumps({"model": "digits", "data": [*PIXELS[1:], float("nan")]}).encode(), "JSON"),
        (json.dumps({"model": "digits", "data": [*PIXELS[1:], 1e39]}).encode(), "not finite"),
        (json.dumps({"model": "digits", "data": [*PIXELS[1:], 10**400]}).encode(), "too large"),
        (b'{"model": "digits", "data": {"npy": "???"}}', "base64"),
        (b'{"model": "digits", "data": {"npy": "AAAA"}}', "no .npy file"),
        (b'{"model": "digits", "data": "zeros"}', "data"),
        (b'{"model": "mixed", "data": [1]}', "12 inputs"),
    ],
)
def test_infer_what_fits_no_model_is_refused_with_the_reason(
    models: FakeModels, client: httpx.Client, body: bytes, reason: str
) -> None:
    found = client.post("/page/infer", content=body, headers={"Content-Type": "application/json"})
    assert found.status_code == 400
    assert found.json()["kind"] == "input"
    assert reason in found.json()["error"]
    assert not models["digits"].submitted + models["mixed"].submitted


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (QueueFullError("too much waits"), 429, "busy"),
        (ModelNotReadyError("being unloaded"), 503, "model"),
        (DeadlineError("too late"), 504, "late"),
        (DataError("an output is not finite"), 422, "data"),
        (IntegrityError("block 0"), 502, "integrity"),
        (RemoteProtocolError("gone"), 502, "server"),
        (HeinferError("something else"), 500, "failed"),
    ],
)
def test_infer_failures_are_told_by_their_kind(
    models: FakeModels, client: httpx.Client, error: HeinferError, status: int, kind: str
) -> None:
    models["digits"].failure = error
    found = ask(client, PIXELS)
    assert (found.status_code, found.json()["kind"]) == (status, kind)
    assert ("retry-after" in found.headers) == (status in (429, 503))
    assert found.json()["error"]


def test_infer_foreign_exception_says_nothing_of_itself(models: FakeModels, client: httpx.Client) -> None:
    models["digits"].failure = ZeroDivisionError("0.125")
    found = ask(client, PIXELS)
    assert found.status_code == 500
    assert "0.125" not in found.text


def test_infer_unknown_model_is_refused(client: httpx.Client) -> None:
    found = ask(client, PIXELS, "other")
    assert (found.status_code, found.json()["kind"]) == (404, "model")


def test_infer_page_that_goes_away_takes_its_query_along(models: FakeModels, client: httpx.Client) -> None:
    models["digits"].hold()
    with pytest.raises(httpx.ReadTimeout):
        client.post("/page/infer", json={"model": "digits", "data": PIXELS}, timeout=0.3)
    client.close()
    deadline = time.monotonic() + 5
    while models["digits"].pending and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(models["digits"].submitted) == 1
    assert models["digits"].pending == 0


@pytest.mark.parametrize("announced", [True, False])
def test_infer_body_beyond_the_limit_is_not_read(models: FakeModels, announced: bool) -> None:
    largest = 2**16
    body = b" " * (largest + 1)
    content = body if announced else iter([body[:40_000], body[40_000:]])
    with served(models, limits=ServingLimits(body_bytes=largest, json_bytes=largest)) as client:
        found = client.post("/page/infer", content=content, headers={"Content-Type": "application/json"})
    assert (found.status_code, found.json()["kind"]) == (413, "input")


def test_infer_bodies_that_have_no_room_are_told_to_come_again(models: FakeModels) -> None:
    small = ServingLimits(body_bytes=2**16, json_bytes=2**16, total_bytes=2**16)
    with served(models, limits=small) as client:
        found = ask(client, PIXELS)  # 15 KB of JSON, which count many times
        assert (found.status_code, found.json()["kind"]) == (429, "busy")
        assert client.post("/page/infer", json={"model": "digits", "data": "random"}).status_code == 200


# --- .npy files


@pytest.mark.parametrize(
    ("array", "version"),
    [
        (np.arange(6, dtype="<f4").reshape(2, 3), None),
        (np.asfortranarray(np.arange(6, dtype=">f8").reshape(2, 3)), None),
        (np.arange(6, dtype="u1").reshape(1, 2, 3), (2, 0)),
        (np.arange(6, dtype="<f2").reshape(2, 3), (1, 0)),
        (np.array([[True, False, True], [False, False, True]]), None),
    ],
)
def test_read_npy_numbers_of_the_shape_are_taken(array: np.ndarray, version: tuple[int, int] | None) -> None:
    found = read_npy(npy(array, version), TensorSpec("x", (2, 3)))
    assert found.dtype == np.float32
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(found, array.reshape(1, 2, 3).astype(np.float32))


def _with_header(header: str, values: bytes = b"") -> bytes:
    padded = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded + values


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no .npy file"),
        (b"PK\x03\x04", "no .npy file"),
        (npy(np.zeros((2, 3)))[:40], "no .npy file"),
        (npy(np.zeros((2, 3)))[:-1], "47 bytes"),
        (npy(np.zeros((2, 3))) + b"x", "49 bytes"),
        (npy(np.zeros((3, 2))), "shape"),
        (npy(np.zeros((2, 2, 3))), "one sample"),
        (npy(np.zeros((2, 3), np.complex64)), "complex64"),
        (npy(np.zeros((2, 3), "S4")), "expected float32"),
        (npy(np.zeros((2, 3), [("a", "<f4")])), "expected float32"),
        (npy(np.full((2, 3), np.inf)), "not finite"),
        (npy(np.full((2, 3), 1e300)), "too large"),
        (_with_header("{'descr': '|O', 'fortran_order': False, 'shape': (2, 3), }", b"cos\nsystem\n"), "object"),
        (_with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }"), "shape"),
        (_with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (-2, -3), }"), "shape"),
        (_with_header("{'descr': " + "(" * 60 + ")" * 30), "no .npy file"),
        (b"\x93NUMPY\x03\x00" + bytes(200), "version"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(200), "no .npy file"),
    ],
)
def test_read_npy_anything_else_is_refused_with_the_reason(content: bytes, reason: str) -> None:
    with pytest.raises(InputError, match=re.escape(reason)):
        read_npy(content, TensorSpec("x", (2, 3)))


@given(st.data())
def test_read_npy_damaged_files_raise_nothing_but_input_errors(data: st.DataObject) -> None:
    content = bytearray(npy(np.arange(6.0).reshape(2, 3)))
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[place] = data.draw(st.integers(0, 255))
    try:
        found = read_npy(bytes(content), TensorSpec("x", (2, 3)))
    except InputError:
        return
    assert found.shape == (1, 2, 3)


def test_page_query_integers_are_not_made_of_fractions() -> None:
    plan = fake_plan("m", [TensorSpec("ids", (2,), "int64")], [TensorSpec("y", (2,))])
    with pytest.raises(InputError, match="int64"):
        PageQuery("m", [0.5, 1.5]).inputs(plan)
    with pytest.raises(InputError, match="float64"):
        read_npy(npy(np.array([0.5, 1.5])), plan.inputs[0])
    np.testing.assert_array_equal(read_npy(npy(np.array([3, 4], "i4")), plan.inputs[0]), [[3, 4]])


# --- whom it answers


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "none"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Host": "evil.example"}, 403),
    ],
)
def test_infer_only_the_nodes_own_page_is_answered(
    models: FakeModels, client: httpx.Client, headers: dict[str, str], status: int
) -> None:
    assert ask(client, PIXELS, **headers).status_code == status
    assert len(models["digits"].submitted) == (status == 200)


def test_infer_request_that_no_page_sent_is_refused(models: FakeModels, client: httpx.Client) -> None:
    del client.headers["Origin"], client.headers["Sec-Fetch-Site"]
    assert ask(client, PIXELS).status_code == 403
    assert not models["digits"].submitted


def test_status_other_sites_scripts_are_refused_and_people_are_not(client: httpx.Client) -> None:
    assert client.get("/page/status", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert client.get("/page/status", headers={"Sec-Fetch-Site": "none"}).status_code == 200


def _host_is_taken(hosts: tuple[str, ...], header: str) -> bool:
    request = Request({"type": "http", "headers": [(b"host", header.encode())]})
    try:
        PageGuard.of(hosts).check_host(request)
    except Refusal:
        return False
    return True


@pytest.mark.parametrize(
    ("hosts", "header", "taken"),
    [
        ((), "localhost", True),
        ((), "LOCALHOST.:8000", True),
        ((), "127.0.0.1:8000", True),
        ((), "[::1]:8000", True),
        ((), "10.0.0.7:8000", False),
        ((), "evil.example:8000", False),
        ((), "localhost.evil.example", False),
        ((), "127.0.0.1.evil.example", False),
        ((), "evil.example@localhost", False),
        ((), "localhost:x", False),
        ((), "localhost/evil.example", False),
        ((), "[::1", False),
        ((), "", False),
        (("10.0.0.7",), "10.0.0.7:8000", True),
        (("10.0.0.7",), "10.0.0.8:8000", False),
        (("Node.Example",), "node.example:8000", True),
        (("node.example",), "evil.node.example", False),
        (("0.0.0.0",), "192.0.2.1:8000", True),
        (("::",), "[2001:db8::1]:8000", True),
        (("0.0.0.0",), "evil.example", False),
        (("0.0.0.0", "node.example"), "node.example", True),
    ],
)
def test_guard_names_that_are_not_the_nodes_are_refused(hosts: tuple[str, ...], header: str, taken: bool) -> None:
    assert _host_is_taken(hosts, header) is taken


def test_tokens_the_document_is_open_and_the_rest_wants_one(models: FakeModels, tmp_path: Path) -> None:
    token = make_token()
    (tmp_path / "tokens").write_text(token_line(token, "ward"))
    with served(models, TokenFile(tmp_path / "tokens")) as client:
        assert client.get("/").status_code == 200
        assert httpx.get(client.base_url, headers={"Host": "evil.example"}).status_code == 421
        refusals = []
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {token}"}):
            refusals += [client.get("/page/status", headers=headers), ask(client, PIXELS, **headers)]
        assert {r.status_code for r in refusals} == {401}
        assert len({r.text for r in refusals}) == 1
        assert not models["digits"].submitted
        right = {"Authorization": f"Bearer {token}"}
        assert client.get("/page/status", headers=right).status_code == 200
        assert ask(client, PIXELS, **right).status_code == 200


def test_page_routes_alone_refuse_without_a_token_too(models: FakeModels, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(token_line(make_token(), "ward"))
    app = Starlette(routes=page_routes(models, hosts=["node.example"], tokens=TokenFile(tmp_path / "tokens")))

    async def get(host: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://{host}") as client:
            return await client.get("/page/status")

    assert asyncio.run(get("node.example")).json()["kind"] == "token"
    assert asyncio.run(get("evil.example")).json()["kind"] == "host"


# --- what the server saw, with a real server


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    partition(dense_model(folder / "dense.onnx"), folder / "bundle")
    return folder / "bundle"


def _uploads(node: SmallNode, monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Note what the server evaluates for block 0: one sample's b, value by value."""
    seen: list[np.ndarray] = []
    ciphertexts, prepared = node.evaluator.evaluate, node.evaluator.prepared.evaluate
    plan = node.models.get(MODEL).plan

    def watch_ciphertexts(block: int, residues: np.ndarray) -> np.ndarray:
        if block == 0:
            seen.append(residues[:, 0].copy())
        return ciphertexts(block, residues)

    def watch_prepared(block: int, packed: np.ndarray) -> np.ndarray:
        if block == 0:
            seen.append(unpack(packed, plan.blocks[0].prepared.values_up, plan.ring.modulus)[0])
        return prepared(block, packed)

    monkeypatch.setattr(node.evaluator, "evaluate", watch_ciphertexts)
    monkeypatch.setattr(node.evaluator.prepared, "evaluate", watch_prepared)
    return seen


@pytest.mark.parametrize("mode", [ModeChoice.PREPARED, ModeChoice.STANDARD])
def test_server_view_is_what_the_server_got_and_is_new_each_time(
    bundle: Path, mode: ModeChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_node(bundle, mode=mode) as node, served(node.models) as client:
        seen = _uploads(node, monkeypatch)
        first, second = (ask(client, [0.3, 0.4, 0.5], MODEL).json() for _ in range(2))
        modulus = node.models.get(MODEL).plan.ring.modulus
    for found, wanted in zip((first, second), seen, strict=True):
        view = found["server"]
        assert (view["block"], view["values"], view["bits"]) == (0, len(wanted), 50)
        assert view["bytes"] > 0
        assert list(base64.b64decode(view["picture"])) == [int(x) >> 42 for x in wanted]
        counts = [0] * 16
        for x in wanted:
            counts[int(x) * 16 // modulus] += 1
        assert view["histogram"] == counts
    assert first["outputs"] == second["outputs"]
    assert first["server"]["picture"] != second["server"]["picture"]
    assert first["mode"] == mode.value


def test_server_view_of_a_picture_is_flat_where_the_picture_is_not(lenet_bundle: Path) -> None:
    drawn = np.zeros((28, 28))
    drawn[4:24, 13:15] = 1
    with small_node(lenet_bundle, mode=ModeChoice.PREPARED) as node, served(node.models) as client:
        found = ask(client, drawn.ravel().tolist(), MODEL).json()
    view = found["server"]
    assert (view["width"], view["shown"], view["values"], view["bytes"]) == (28, 784, 784, 5000)
    assert found["node"]["histogram"] == [744, *[0] * 14, 40]
    # Pearson's test with 15 degrees of freedom: beyond 60.6 with a probability of 2e-7.
    assert sum((n - 49) ** 2 / 49 for n in view["histogram"]) < 60.6
    assert len(set(base64.b64decode(view["picture"]))) > 200


def test_times_parts_leave_nothing_of_the_whole_out(bundle: Path) -> None:
    with small_node(bundle) as node, served(node.models) as client:
        found = ask(client, [0.3, 0.4, 0.5], MODEL).json()["times_ms"]
    parts = [found[name] for name in ("node", "server", "wire", "waiting")]
    assert all(part >= 0 for part in parts)
    assert sum(parts) >= found["total"] - 0.05  # rounded to 0.01 each
