"""An HTTP server over fake models, for tests, and what they send to it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from heinfer.wire import Address, PlainText, Security, TokenFile
from tests.interfaces.fakes import FakeModels, Notes, fake_models
from trusted_node.serving.http_app import make_app
from trusted_node.serving.http_server import HttpServer
from trusted_node.serving.limits import ServingLimits

LOOPBACK = Address("127.0.0.1", 0)
DIGITS = "/v2/models/digits/infer"
MIXED = "/v2/models/mixed/infer"


@dataclass
class Served:
    """A server, what it serves and a plain client of it."""

    server: HttpServer
    models: FakeModels
    notes: Notes
    http: httpx.Client

    @property
    def address(self) -> str:
        return str(self.server.address)


@contextmanager
def served(
    limits: ServingLimits | None = None,
    tokens: TokenFile | None = None,
    security: Security = PlainText.ON_LOOPBACK,
    models: FakeModels | None = None,
    allow_control: bool | None = None,
    headers: dict[str, str] | None = None,
) -> Iterator[Served]:
    """Serve fake models until the block ends."""
    models = models or fake_models()
    notes = Notes()
    app = make_app(models, limits, tokens, observer=notes, allow_control=allow_control)
    server = HttpServer(LOOPBACK, app, security, limits)
    try:
        with httpx.Client(base_url=f"http://{server.address}", headers=headers, timeout=20) as http:
            yield Served(server, models, notes, http)
    finally:
        server.stop(0)


def digits(samples: int, seed: int = 3) -> NDArray[np.float32]:
    """Images for the model "digits"."""
    return np.random.default_rng(seed).normal(size=(samples, 1, 28, 28)).astype(np.float32)


def json_query(x: NDArray[np.float32], **more: Any) -> dict[str, Any]:
    """A query of "digits" in JSON."""
    tensor = {"name": "x", "shape": list(x.shape), "datatype": "FP32", "data": x.ravel().tolist()}
    return {"inputs": [tensor], **more}


def binary_query(
    inputs: dict[str, tuple[str, Sequence[int], bytes]], sizes: dict[str, Any] | None = None, **more: Any
) -> tuple[bytes, dict[str, str]]:
    """A query with values in binary: its body and headers. `sizes` are announced instead of the true ones."""
    tensors = [
        {
            "name": name,
            "shape": list(shape),
            "datatype": datatype,
            "parameters": {"binary_data_size": (sizes or {}).get(name, len(raw))},
        }
        for name, (datatype, shape, raw) in inputs.items()
    ]
    head = json.dumps({"inputs": tensors, **more}).encode()
    body = b"".join([head, *(raw for _, _, raw in inputs.values())])
    return body, {"Inference-Header-Content-Length": str(len(head))}


def binary_digits(x: NDArray[np.float32], **more: Any) -> tuple[bytes, dict[str, str]]:
    """A query of "digits" in binary."""
    return binary_query({"x": ("FP32", x.shape, x.tobytes())}, **more)


def error_of(response: httpx.Response) -> str:
    """Return an error's text; it is all that the answer holds."""
    assert response.headers["content-type"] == "application/json"
    content = response.json()
    assert list(content) == ["error"], content
    return str(content["error"])
