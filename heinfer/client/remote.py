"""A model behind a trusted node."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from heinfer.client.tracing import client_span
from heinfer.errors import InputError, RemoteProtocolError
from heinfer.wire import (
    PROTOCOL_VERSION,
    Address,
    Description,
    Limits,
    PlainText,
    QueryClient,
    QueryFailedError,
    QueryHeader,
    Security,
    Tls,
    describe_tensors,
    iterate_tensor_chunks,
    parse_address,
)


@dataclass(frozen=True, slots=True)
class Answer:
    """Outputs by name; statistics and values inside the model, where they were asked for."""

    outputs: dict[str, NDArray[Any]]
    statistics: dict[str, Any]
    trace: dict[str, NDArray[Any]]


class RemoteModel:
    """A model that a node serves; a context manager, safe to use from several threads.

    Attributes:
        address: where the node listens.
        description: inputs, outputs and limits, as the node states them.
    """

    def __init__(
        self,
        address: Address | str,
        limits: Limits | None = None,
        security: Security = PlainText.ON_LOOPBACK,
        token: str | None = None,
        model: str = "",
    ) -> None:
        self._limits = limits or Limits()
        self.address = parse_address(address) if isinstance(address, str) else address
        self._client = QueryClient(self.address, self._limits, security, token, model)
        self._ids = itertools.count(1)
        try:
            self.description: Description = self._describe(model)
        except BaseException:
            self._client.close()
            raise

    def _describe(self, model: str) -> Description:
        try:
            description = self._client.describe()
        except QueryFailedError:
            raise
        except RemoteProtocolError as error:
            raise RemoteProtocolError(f"no node answers at {self.address}: {error}") from error
        if description.protocol_version != PROTOCOL_VERSION:
            raise RemoteProtocolError(
                f"the node at {self.address} speaks version {description.protocol_version} of the protocol, "
                f"expected {PROTOCOL_VERSION}: install the same heinfer on both sides"
            )
        if model and description.model != model:  # an older node does not hear which one we ask for
            raise RemoteProtocolError(
                f"the node at {self.address} answers for model {description.model!r}, expected {model!r}: install the "
                "same heinfer on both sides"
            )
        return description

    def __enter__(self) -> Self:
        """Return the model."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections."""
        self.close()

    def close(self) -> None:
        """Close the connections; threads that wait in a query get a RemoteProtocolError."""
        self._client.close()

    def predict(self, x: NDArray[Any] | Mapping[str, NDArray[Any]]) -> Any:
        """Return the model's answer for a batch.

        Args:
            x: samples first, then the model's input shape; or one such array an input, by name.

        Returns:
            An array, or a dict of arrays by name where the model has several outputs.

        Raises:
            InputError: shape, type or values don't fit.
            QueryFailedError: the node or the server failed, or the data did inside the model.
        """
        outputs = self.query(x).outputs
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def query(
        self, x: NDArray[Any] | Mapping[str, NDArray[Any]], *, statistics: bool = False, trace_samples: int = 0
    ) -> Answer:
        """Return outputs, and on request what they cost and values inside the model.

        Args:
            x: as for `predict`.
            statistics: ask for costs and bounds.
            trace_samples: leading samples whose values around every block come back; the node must allow it.

        Raises:
            InputError: as for `predict`.
            QueryFailedError: as for `predict`.
        """
        inputs = self.prepare(x)
        chunks = iterate_tensor_chunks(inputs, self._limits)
        specs = describe_tensors(inputs)
        with client_span(self.description.model, len(next(iter(inputs.values())))) as traceparent:
            header = QueryHeader(next(self._ids), specs, statistics, trace_samples, next(chunks, None), traceparent)
            tensors, found = self._client.ask(header, chunks)
        outputs = {t.name: tensors[t.name] for t in self.description.outputs if t.name in tensors}
        trace = {name: array for name, array in tensors.items() if name not in outputs}
        return Answer(outputs, json.loads(found.json) if found is not None else {}, trace)

    def prepare(self, x: NDArray[Any] | Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Name the inputs and check shapes and types before anything is sent.

        Raises:
            InputError: they don't fit.
        """
        specs = self.description.inputs
        if not isinstance(x, Mapping):
            if len(specs) != 1:
                raise InputError(f"the model has inputs {[t.name for t in specs]}: pass a dict of arrays")
            x = {specs[0].name: x}
        inputs = {}
        for spec in specs:
            if spec.name not in x:
                raise InputError(f"input {spec.name!r} is missing; found {sorted(x)}")
            array = np.asarray(x[spec.name])
            if array.ndim != len(spec.shape) or array.shape[1:] != spec.shape[1:]:
                shown = ", ".join("samples" if d is None else str(d) for d in spec.shape)
                raise InputError(f"input {spec.name!r}: expected shape ({shown}), found {array.shape}")
            if array.dtype != spec.dtype:
                if array.dtype.kind != "f" or np.dtype(spec.dtype).kind != "f":
                    raise InputError(f"input {spec.name!r}: expected {spec.dtype}, found {array.dtype}; convert it")
                array = array.astype(spec.dtype)
            inputs[spec.name] = array
        return inputs


def connect(
    address: Address | str,
    *,
    tls: str | Path | Tls | None = None,
    token: str | None = None,
    insecure_plain_text: bool = False,
    model: str = "",
) -> RemoteModel:
    """Connect to a node.

    Args:
        address: "host:port"; under TLS the node's certificate must name this host.
        tls: our certificate and whom we believe: a folder with ca.pem, cert.pem and key.pem, or single files
            (`heinfer.wire.Tls.load`). None: plain text, on this machine only.
        token: says who we are, for a node that wants one.
        insecure_plain_text: send queries unencrypted to other machines too, over a network that encrypts by itself.
        model: which of the node's models, by its name; "": its only or first one.

    Raises:
        RemoteProtocolError: nobody answers there, or the node refuses us.
        TransportError: the node's certificate or our own files are refused, or plain text would leave this machine.
    """
    security: Security = PlainText.ANYWHERE if insecure_plain_text else PlainText.ON_LOOPBACK
    if tls is not None:
        if insecure_plain_text:
            raise InputError("either tls or insecure_plain_text, not both")
        security = tls if isinstance(tls, Tls) else Tls.from_folder(tls)
    return RemoteModel(address, security=security, token=token, model=model)
