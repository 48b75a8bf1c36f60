"""The page over fake models or real ones, for tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from heinfer.wire import Address, TokenFile
from trusted_node.serving.http_app import make_app
from trusted_node.serving.http_server import HttpServer
from trusted_node.serving.interface import ModelEntry, Models, ServedModel
from trusted_node.serving.limits import ServingLimits
from trusted_node.serving.page import page_routes


class Current:
    """Models that a test can exchange under a server that goes on."""

    def __init__(self, models: Models) -> None:
        self.models = models

    def get(self, name: str, version: str = "") -> ServedModel:
        return self.models.get(name, version)

    def entries(self) -> Sequence[ModelEntry]:
        return self.models.entries()

    def load(self, name: str) -> None:
        self.models.load(name)

    def unload(self, name: str) -> None:
        self.models.unload(name)

    @property
    def ready(self) -> bool:
        return self.models.ready


@contextmanager
def page_of(models: Models, tokens: TokenFile | None = None, limits: ServingLimits | None = None) -> Iterator[str]:
    """Serve the page as a node does; yields its origin."""
    routes = page_routes(models, hosts=["127.0.0.1"], tokens=tokens, limits=limits)
    app = make_app(models, tokens=tokens, routes=routes)
    server = HttpServer(Address("127.0.0.1", 0), app)
    try:
        yield f"http://{server.address}"
    finally:
        server.stop(0)
