"""A server and a node with one small model in this process, with whoever watches them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from heinfer.operators.backends import NATIVE, backend_on, open_device
from heinfer.plan import load_server
from heinfer.server.evaluation import BlockEvaluator
from heinfer.server.observing import RequestObserver
from heinfer.server.service import EvaluatorService
from heinfer.spans import NO_TRACER, Tracer
from heinfer.wire import Address
from tests.parties import IMPATIENT, LOOPBACK
from trusted_node.modes import ModeChoice
from trusted_node.service import NodeService
from trusted_node.serving.interface import Observer
from trusted_node.serving.loading import ModelSettings
from trusted_node.serving.repository import ModelFolder, ModelRepository

MODEL = "small"


@dataclass
class SmallNode:
    """Everything of both parties."""

    evaluator: BlockEvaluator
    server: EvaluatorService
    models: ModelRepository
    node: NodeService


@contextmanager
def small_node(
    bundle: Path,
    *,
    name: str = MODEL,
    mode: ModeChoice = ModeChoice.AUTO,
    observer: Observer | None = None,
    tracer: Tracer = NO_TRACER,
    server_observer: RequestObserver | None = None,
    server_tracer: Tracer = NO_TRACER,
    through: Callable[[Address], Address] = lambda address: address,
    device: str = NATIVE,
) -> Iterator[SmallNode]:
    """Start both; nothing is prepared ahead. `through` may put something between them and return its address.

    Each opens the device for itself, as processes would.
    """
    with ExitStack() as stack:
        evaluator = BlockEvaluator(load_server(bundle / "server"), backend=backend_on(open_device(device)))
        server = EvaluatorService(evaluator, LOOPBACK, IMPATIENT, observer=server_observer, tracer=server_tracer)
        stack.callback(server.stop, 0.0)
        settings = ModelSettings(
            [through(server.address)],
            IMPATIENT,
            mode=mode,
            workers=1,
            prepared=0,
            tracer=tracer,
            device=open_device(device),
        )
        models = ModelRepository([ModelFolder(name, bundle / "node")], settings, observer)
        stack.callback(models.close, 0.0)
        models.load_all()
        node = NodeService(models, name, LOOPBACK, IMPATIENT, allow_trace=True)
        stack.callback(node.stop, 0.0)
        yield SmallNode(evaluator, server, models, node)
