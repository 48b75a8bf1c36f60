"""Who may ask over HTTP, and what the log says of it."""

from __future__ import annotations

import logging

import pytest

from heinfer.wire import make_token, token_line
from heinfer.wire.tokens import TokenFile
from tests.interfaces.http_serving import DIGITS, digits, error_of, json_query, served

ONE = digits(1)


@pytest.fixture(scope="module")
def node():
    with served() as node:
        yield node


@pytest.mark.parametrize("given", ["", "a b", "x" * 65, "a/../b", "\u00e9", '"'])
def test_request_ids_that_do_not_suit_a_log_are_replaced(node, given):
    answer = node.http.get("/v2/health/live", headers={"X-Request-ID": given.encode("latin-1")})
    assert len(answer.headers["x-request-id"]) == 16
    assert answer.headers["x-request-id"] != given


def test_log_has_pattern_status_and_id_and_nothing_of_the_request(node, caplog):
    with caplog.at_level(logging.DEBUG):
        node.http.post(
            "/v2/models/unheard-of/infer?name=patient", json=json_query(ONE), headers={"X-Request-ID": "clinic-17"}
        )
        node.http.post(DIGITS, json=json_query(ONE, id="patient-9"), headers={"X-Request-ID": "clinic-18"})
    lines = [r.getMessage() for r in caplog.records if r.name == "trusted_node.serving.http_gate"]
    assert lines[0].startswith("POST /v2/models/{name}/infer 404 in ")
    assert lines[0].endswith("request clinic-17 (UnknownModelError)")
    assert lines[1].startswith("POST /v2/models/{name}/infer 200 in ")
    ours = "\n".join(r.getMessage() for r in caplog.records if not r.name.startswith("httpx"))
    assert "patient" not in ours
    assert "unheard-of" not in ours


TOKEN = make_token()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "tokens.sha256"
    path.write_text(token_line(TOKEN, "radiology"))
    with served(tokens=TokenFile(path)) as node:
        yield node


def test_liveness_is_open_and_the_rest_is_not(guarded):
    assert guarded.http.get("/v2/health/live").status_code == 200
    for path in ("/v2", "/v2/health/ready", "/openapi.json", "/v2/models/digits", "/nowhere"):
        assert guarded.http.get(path).status_code == 401, path


def test_missing_and_wrong_tokens_get_the_same_answer(guarded):
    wrong = ["", "Bearer", "Bearer x", f"Bearer {make_token()}", f"Basic {TOKEN}", TOKEN]
    answers = [guarded.http.get("/v2", headers={"Authorization": value}) for value in wrong]
    answers.append(guarded.http.get("/v2"))
    assert {(answer.status_code, answer.text) for answer in answers} == {(401, answers[0].text)}
    assert error_of(answers[0])
    assert answers[0].headers["www-authenticate"] == "Bearer"
    assert guarded.http.post(DIGITS, json=json_query(ONE)).status_code == 401


def test_holders_are_served_and_may_load_models(guarded):
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert guarded.http.post(DIGITS, json=json_query(ONE), headers=headers).status_code == 200
    assert guarded.http.post("/v2/repository/models/digits/load", headers=headers).status_code == 200


def test_description_says_that_a_token_is_needed(guarded):
    headers = {"Authorization": f"Bearer {TOKEN}"}
    description = guarded.http.get("/openapi.json", headers=headers).json()
    assert description["security"] == [{"token": []}]
    assert description["paths"]["/v2/health/live"]["get"]["security"] == []


def test_pages_of_other_sites_are_refused(node):
    own = {"Origin": f"http://{node.address}"}
    assert node.http.get("/v2", headers=own).status_code == 200
    for origin in ("http://elsewhere.example", "null", f"http://{node.address}.elsewhere.example"):
        answer = node.http.post("/v2/repository/models/digits/unload", headers={"Origin": origin})
        assert answer.status_code == 403
        assert "other sites" in error_of(answer)
    assert node.http.get("/v2/models/digits/ready").status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("10.0.0.7:80", 200),
        ("elsewhere.example", 403),
        ("localhost.elsewhere.example", 403),
        ("127.0.0.1.elsewhere.example:8000", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
def test_names_that_may_point_anywhere_are_refused_without_tokens(node, host, status):
    assert node.http.get("/v2", headers={"Host": host}).status_code == status


def test_loading_is_refused_where_the_node_says_so():
    with served(allow_control=False) as node:
        for verb in ("load", "unload"):
            answer = node.http.post(f"/v2/repository/models/digits/{verb}")
            assert answer.status_code == 403
            assert "does not let" in error_of(answer)
        assert node.http.get("/v2/models/digits/ready").status_code == 200
