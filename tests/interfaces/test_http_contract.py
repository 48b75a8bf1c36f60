"""The HTTP interface against its own OpenAPI description: whatever is sent, the answers are as described."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import GenerationMode
from schemathesis.config import SchemathesisConfig
from schemathesis.core.parameters import ParameterLocation

from tests.interfaces.fakes import FakeModels, digits_model, simple_model
from trusted_node.serving.http_app import make_app

#: A query that the description allows is refused all the same where it does not fit its model, so 400 is right there;
#: everywhere else what is allowed must be accepted, or its model be unknown.
CONFIG = {
    "seed": 1,
    "generation": {"deterministic": True, "database": "none"},
    "operations": [
        {
            "include-path-regex": "/infer$",
            "checks": {"positive_data_acceptance": {"expected-statuses": ["2xx", 400, 404]}},
        },
    ],
}
#: A version's paths take what the same ones without it take: two of them stand for all.
ABOUT_MODELS = r"^/v2/models/{name}(/infer|/ready|/config|/stats|/versions/{version}(/infer)?)?$"


class LoadedModels(FakeModels):
    """Models that come back at once: unloading is for other tests, names are remembered from answers here."""

    def unload(self, name):
        super().unload(name)
        self.load(name)


def on_this_machine(app):
    """The client in this process calls the node "testserver"."""

    async def called(scope, receive, send):
        headers = [(name, b"localhost" if name == b"host" else value) for name, value in scope["headers"]]
        await app({**scope, "headers": headers}, receive, send)

    return called


schema = schemathesis.openapi.from_asgi(
    "/openapi.json",
    on_this_machine(make_app(LoadedModels(simple_model(), digits_model()), allow_control=True)),
    config=SchemathesisConfig.from_dict(CONFIG),
)


@schema.exclude(path_regex=ABOUT_MODELS).parametrize()
@settings(max_examples=5, suppress_health_check=list(HealthCheck))
def test_every_answer_is_as_described(case):
    case.call_and_validate()


@schema.include(path_regex=ABOUT_MODELS).parametrize()
@settings(max_examples=10, suppress_health_check=list(HealthCheck))
def test_every_answer_about_a_known_model_is_as_described(case):
    """Names of models are not guessed, so most of them are set to a known one."""
    if case.meta is None or not _is_negative(case.meta.components.get(ParameterLocation.PATH)):
        known = {"name": "simple", "version": "1"}
        case.path_parameters.update({name: known[name] for name in case.path_parameters})
    case.call_and_validate()


def _is_negative(component):
    return component is not None and component.mode is GenerationMode.NEGATIVE


@pytest.mark.parametrize("binary", [True, False])
def test_answer_to_a_good_query_is_as_described(binary):
    tensors = [
        {"name": name, "shape": [1, 16], "datatype": "INT32", "data": list(range(16))} for name in ("INPUT0", "INPUT1")
    ]
    query = {"id": "a", "inputs": tensors, "parameters": {"binary_data_output": binary}}
    operation = schema["/v2/models/{name}/infer"]["POST"]
    answer = operation.Case(path_parameters={"name": "simple"}, body=query, media_type="application/json")
    response = answer.call_and_validate()
    assert response.status_code == 200
    assert response.headers["content-type"] == ["application/octet-stream" if binary else "application/json"]
