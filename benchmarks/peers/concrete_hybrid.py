"""Concrete ML's HybridFHEModel: linear layers on the server, everything else on the client, as heinfer does.

    client                                            server (evaluation keys, quantised weights)
    quantise, encrypt   -> bytes, a round a layer ->  product of integers              -> bytes ->   decrypt, ReLU, ...

Licence: BSD-3-Clause-Clear, which grants no patents; its makers ask for a licence of theirs in commercial use.

HybridFHEModel chooses between two schemes. Where every layer is a linear one of at least 512 x 512, it takes products
on GLWE ciphertexts (`concrete-ml-extensions`), with activations quantised anew for each sample; otherwise TFHE circuits
compiled for each layer and shape, with activations quantised by the calibration. Both at 8 bits, the library's default:
errors are those of quantisation, the cryptography adds none that matter. Compilation and calibration are its own calls;
then each layer runs through its client and server classes, with bytes between them.

torch's new exporter writes operators that Concrete ML does not know, so it is told to use the old one.
"""

from __future__ import annotations

import functools
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

torch.onnx.export = functools.partial(torch.onnx.export, dynamo=False)

from concrete.ml.deployment import FHEModelClient, FHEModelDev, FHEModelServer  # noqa: E402
from concrete.ml.torch.hybrid_model import HybridFHEModel  # noqa: E402
from measuring import Measured, Task, Traffic, main, repeat_queries, summed_up  # noqa: E402
from networks import Convolution, Linear, Network, evaluate_hybrid, read_network  # noqa: E402

BITS, CALIBRATION = 8, 64


class Remote(torch.nn.Module):
    """A network whose layers with weights are modules of torch, for HybridFHEModel to replace."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
        self.names = {layer.name: f"layer{number}" for number, layer in enumerate(network.linear_layers())}
        for layer in network.linear_layers():
            self.add_module(self.names[layer.name], as_module(layer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Evaluate the network, the parts without weights in numpy."""

        def linear(layer: Linear | Convolution, values: np.ndarray) -> np.ndarray:
            module = getattr(self, self.names[layer.name])
            return module(torch.from_numpy(values.astype(np.float32))).detach().numpy()

        return torch.from_numpy(evaluate_hybrid(self.network, x.numpy(), linear))


def as_module(layer: Linear | Convolution) -> torch.nn.Module:
    """Return torch's module with the layer's weights."""
    if isinstance(layer, Linear):
        module: torch.nn.Module = torch.nn.Linear(layer.weight.shape[1], layer.weight.shape[0])
    else:
        outputs, inputs, *kernel = layer.weight.shape
        module = torch.nn.Conv2d(inputs, outputs, tuple(kernel), layer.stride, layer.padding)
    module.load_state_dict({"weight": torch.from_numpy(layer.weight), "bias": torch.from_numpy(layer.bias)})
    return module.eval()


@dataclass(slots=True)
class Circuits:
    """One TFHE circuit a layer, each with a client and a server of the library's own."""

    folder: Path
    clients: dict[str, FHEModelClient] = field(default_factory=dict)
    servers: dict[str, FHEModelServer] = field(default_factory=dict)
    keys: dict[str, bytes] = field(default_factory=dict)

    def add(self, name: str, quantised: Any) -> None:
        """Deploy one compiled layer, and make its keys."""
        path = self.folder / name
        FHEModelDev(str(path), quantised).save()
        self.clients[name] = FHEModelClient(str(path), str(self.folder / "keys"))
        self.servers[name] = FHEModelServer(str(path))
        self.keys[name] = self.clients[name].get_serialized_evaluation_keys()

    def evaluate(self, name: str, x: np.ndarray, traffic: Traffic) -> np.ndarray:
        """Take one sample through a layer."""
        message = self.clients[name].quantize_encrypt_serialize(x.astype(np.float32))
        started = time.perf_counter()
        answer = self.servers[name].run(message, self.keys[name])
        traffic.server_s += time.perf_counter() - started
        traffic.up += len(message)
        traffic.down += len(answer)
        return self.clients[name].deserialize_decrypt_dequantize(answer)


class SerialisedBackend:
    """The GLWE library, with bytes in between: stands in for the module that an executor calls."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.traffic = Traffic()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.library, name)

    def encrypt_matrix(self, **arguments: Any) -> bytes:
        """Return what the client sends."""
        return self.library.encrypt_matrix(**arguments).serialize()

    def matrix_multiplication(self, encrypted_matrix: bytes, **arguments: Any) -> bytes:
        """Do the server's part."""
        started = time.perf_counter()
        matrix = self.library.EncryptedMatrix.deserialize(encrypted_matrix)
        answer = self.library.matrix_multiplication(encrypted_matrix=matrix, **arguments).serialize()
        self.traffic.server_s += time.perf_counter() - started
        self.traffic.up += len(encrypted_matrix)
        self.traffic.down += len(answer)
        return answer

    def decrypt_matrix(self, answer: bytes, *arguments: Any) -> np.ndarray:
        """Return what the client decrypts."""
        return self.library.decrypt_matrix(self.library.CompressedResultEncryptedMatrix.deserialize(answer), *arguments)


def measure(task: Task) -> Measured:
    """Compile with the first samples as calibration, then measure one query after the other."""
    network = read_network(task.model)
    started = time.perf_counter()
    remote = Remote(network)
    hybrid = HybridFHEModel(remote, list(remote.names.values()))
    glwe = hybrid._has_only_large_linear_layers
    calibration = torch.from_numpy(task.x[:CALIBRATION])
    hybrid.compile_model(calibration, n_bits=BITS, use_dynamic_quantization=glwe)
    if glwe:
        return _measure_glwe(task, hybrid, started)
    with tempfile.TemporaryDirectory() as folder:
        return _measure_circuits(task, network, hybrid, remote.names, Path(folder), started)


def _measure_glwe(task: Task, hybrid: HybridFHEModel, started: float) -> Measured:
    hybrid.executor.keygen()
    backend = hybrid.executor.fhext = SerialisedBackend(hybrid.executor.fhext)
    prepared_s = time.perf_counter() - started
    traffics: list[Traffic] = []

    def query(sample: np.ndarray) -> np.ndarray:
        backend.traffic = Traffic()
        output = hybrid(torch.from_numpy(sample), fhe="execute").detach().numpy()
        traffics.append(backend.traffic)
        return output

    parameters = {"backend": "GLWE", "glwe": hybrid.executor.glwe_crypto_params.serialize()}
    key_bytes = len(hybrid.executor.compression_key.serialize())
    return _measured(task, query, traffics, prepared_s, key_bytes, parameters)


def _measure_circuits(
    task: Task, network: Network, hybrid: HybridFHEModel, names: dict[str, str], folder: Path, started: float
) -> Measured:
    circuits = Circuits(folder)
    for name in names.values():
        circuits.add(name, hybrid.private_q_modules[name])
    prepared_s = time.perf_counter() - started
    traffics: list[Traffic] = []

    def query(sample: np.ndarray) -> np.ndarray:
        traffic = Traffic()
        traffics.append(traffic)

        def linear(layer: Linear | Convolution, x: np.ndarray) -> np.ndarray:
            return circuits.evaluate(names[layer.name], x, traffic)

        return evaluate_hybrid(network, sample, linear)

    key_bytes = sum(len(key) for key in circuits.keys.values())
    return _measured(task, query, traffics, prepared_s, key_bytes, {"backend": "TFHE circuits"})


def _measured(
    task: Task, query: Any, traffics: list[Traffic], prepared_s: float, key_bytes: int, parameters: dict[str, Any]
) -> Measured:
    outputs, seconds = repeat_queries(task, query)
    return Measured(
        outputs,
        seconds,
        preparation_s=prepared_s,
        **summed_up(traffics),
        key_bytes=key_bytes,
        security_bits=128,
        note="activations exact on the client; weights and activations quantised to 8 bits",
        parameters={**parameters, "bits": BITS, "security_by": "the library's defaults"},
    )


if __name__ == "__main__":
    main("concrete-hybrid", ("concrete-ml", "concrete-ml-extensions", "concrete-python"), measure)
