"""The OpenAPI 3.1 description of the node's HTTP interface, made from the models that requests are read with.

GET /openapi.json --> {"openapi": "3.1.0", "paths": {"/v2/models/{name}/infer": {"post": ...}, ...}, ...}
"""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from trusted_node.serving.request_models import ControlRequest, IndexRequest, InferRequest

_JSON = "application/json"
_BINARY = "application/octet-stream"
_REFERENCE = "#/components/schemas/{model}"
_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
_VERSION = {"name": "version", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
_JSON_LENGTH = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "description": "How many bytes of the body are JSON, where values follow in binary.",
    "schema": {"type": "integer", "minimum": 1},
}
_REASONS = {
    400: "The request is malformed or does not fit the model.",
    401: "There is no token, or a wrong one.",
    403: "A page of another site asks, or this is not allowed to clients.",
    404: "There is no such model, or not in this version.",
    408: "The body did not come in time.",
    413: "The request is too large.",
    415: "The body's coding is unknown.",
    500: "The node failed.",
    502: "The untrusted server failed, or its answer was not honest.",
    503: "Not ready, or so much waits already that this is refused; Retry-After says when to ask again.",
    504: "The query's time was over.",
}


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": {**required, **optional}}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=name)}


_TIMES = _object({"count": _COUNT, "ns": _COUNT})
#: Answers, by name.
_ANSWERS = {
    "Error": _object({"error": _TEXT}),
    "Live": _object({"live": {"type": "boolean"}}),
    "Ready": _object({"ready": {"type": "boolean"}}),
    "ModelReady": _object({"name": _TEXT, "ready": {"type": "boolean"}}),
    "ServerMetadata": _object({"name": _TEXT, "version": _TEXT, "extensions": _list(_TEXT)}),
    "TensorMetadata": _object({"name": _TEXT, "datatype": _TEXT, "shape": _list({"type": "integer", "minimum": -1})}),
    "ModelMetadata": _object(
        {
            "name": _TEXT,
            "versions": _list(_TEXT),
            "platform": _TEXT,
            "inputs": _list(_ref("TensorMetadata")),
            "outputs": _list(_ref("TensorMetadata")),
        }
    ),
    "TensorConfiguration": _object({"name": _TEXT, "data_type": _TEXT, "dims": _list(_COUNT)}),
    "ModelConfiguration": _object(
        {
            "name": _TEXT,
            "platform": _TEXT,
            "backend": _TEXT,
            "max_batch_size": _COUNT,
            "input": _list(_ref("TensorConfiguration")),
            "output": _list(_ref("TensorConfiguration")),
        },
        dynamic_batching={"type": "object"},
    ),
    "ModelCounts": _object(
        {
            "name": _TEXT,
            "version": _TEXT,
            "last_inference": _COUNT,
            "inference_count": _COUNT,
            "inference_stats": _object({"success": _TIMES, "fail": _TIMES}),
        }
    ),
    "Statistics": _object({"model_stats": _list(_ref("ModelCounts"))}),
    "RepositoryIndex": _list(
        _object(
            {
                "name": _TEXT,
                "version": _TEXT,
                "state": {"enum": ["LOADING", "READY", "UNLOADING", "UNAVAILABLE"]},
                "reason": _TEXT,
            }
        )
    ),
    "Done": {"type": "object"},
    "InferOutput": _object(
        {"name": _TEXT, "datatype": _TEXT, "shape": _list(_COUNT)},
        parameters=_object({}, binary_data_size=_COUNT),
        data=_list({"type": ["number", "boolean"]}),
    ),
    "InferResponse": _object(
        {"model_name": _TEXT, "model_version": _TEXT, "outputs": _list(_ref("InferOutput"))}, id=_TEXT
    ),
}


def describe(version: str, has_tokens: bool) -> dict[str, Any]:
    """Return the description.

    Args:
        version: of heinfer.
        has_tokens: whether clients need a token.
    """
    _, asked = models_json_schema(
        [(kind, "validation") for kind in (InferRequest, IndexRequest, ControlRequest)], ref_template=_REFERENCE
    )
    schemas = {**asked["$defs"], **_ANSWERS}
    description: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "heinfer node",
            "version": version,
            "summary": "The Open Inference Protocol v2: queries are answered by a server that sees none of them.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": _paths(),
        "components": {"schemas": schemas},
    }
    if has_tokens:
        description["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        description["security"] = [{"token": []}]
        description["paths"]["/v2/health/live"]["get"]["security"] = []
    return description


def _paths() -> dict[str, Any]:
    plain = {
        "/v2/health/live": {"get": _operation("live", "Whether the node runs.", "Live")},
        "/v2/health/ready": {"get": _operation("ready", "Whether every model is ready.", "Ready", (503,))},
        "/v2": {"get": _operation("metadata", "Name, version and extensions.", "ServerMetadata")},
        "/v2/models/stats": {"get": _operation("allStatistics", "Counts of all loaded models.", "Statistics")},
        "/v2/repository/index": {"post": _index()},
        "/v2/repository/models/{name}/load": {"post": _control("load", "Load a model, or read it anew.")},
        "/v2/repository/models/{name}/unload": {"post": _control("unload", "Unload a model.")},
    }
    models: dict[str, Any] = {}
    for prefix, parameters, suffix in (
        ("/v2/models/{name}", [_NAME], ""),
        ("/v2/models/{name}/versions/{version}", [_NAME, _VERSION], "OfVersion"),
    ):
        for tail, name, text, answer in (
            ("", "model", "What goes in and what comes out.", "ModelMetadata"),
            ("/ready", "modelReady", "Whether the model can be asked.", "ModelReady"),
            ("/config", "configuration", "The same as a Triton model configuration.", "ModelConfiguration"),
            ("/stats", "statistics", "Counts of queries over HTTP.", "Statistics"),
        ):
            operation = _operation(name + suffix, text, answer, (404, 503))
            models[prefix + tail] = {"parameters": parameters, "get": operation}
        models[prefix + "/infer"] = {"parameters": parameters, "post": _infer("infer" + suffix)}
    return {**plain, **models}


def _operation(
    name: str, summary: str, answer: str, failures: tuple[int, ...] = (), body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Describe an operation that answers in JSON; any may be refused for want of a token, or fail."""
    errors = {
        str(status): {"description": _REASONS[status], "content": {_JSON: {"schema": _ref("Error")}}}
        for status in sorted({401, 403, 500, *failures})
    }
    done = {"200": {"description": "Done.", "content": {_JSON: {"schema": _ref(answer)}}}}
    operation = {"operationId": name, "summary": summary, "responses": {**done, **errors}}
    return operation if body is None else {**operation, "requestBody": body}


def _index() -> dict[str, Any]:
    body = {"content": {_JSON: {"schema": _ref("RepositoryIndexRequest")}}}
    return _operation("index", "List the models.", "RepositoryIndex", (400, 408, 413, 415, 503), body)


def _control(name: str, summary: str) -> dict[str, Any]:
    body = {"content": {_JSON: {"schema": _ref("RepositoryControlRequest")}}}
    failures = (400, 404, 408, 413, 415, 502, 503)
    return {**_operation(name, summary, "Done", failures, body), "parameters": [_NAME]}


def _infer(name: str) -> dict[str, Any]:
    binary = {"schema": {"type": "string", "format": "binary", "description": "JSON, then values in binary."}}
    body = {"required": True, "content": {_JSON: {"schema": _ref("InferRequest")}, _BINARY: binary}}
    failures = (400, 404, 408, 413, 415, 502, 503, 504)
    operation = _operation(name, "Run a query.", "InferResponse", failures, body)
    operation["responses"]["200"]["content"][_BINARY] = binary
    return {**operation, "parameters": [_JSON_LENGTH]}
