"""Large published architectures: what partitioning takes, and one encrypted sample through some of them.

    python benchmarks/large_models.py [--only squeezenet bert_encoder ...] [--batch 8] [--json FILE]

Networks for images are those of onnx.backend.test's light models at 224x224 (tests/coverage/light_models.py) and
MobileNetV2 (mobilenet_v2.py), the encoder reads 128 tokens (bert_encoder.py). Weights are random, so that accuracy
means nothing: results, or what enters the final Softmax, are compared with onnxruntime on the original. Partitioning
runs in a process of its own. Queries: client, node and server as three processes on loopback, one sample or `--batch`
together, masks prepared before. What `--json` has of other models stays; benchmarks/results/large_models.json has ours.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from bert_encoder import bert_encoder, token_ids
from mobilenet_v2 import mobilenet_v2
from numpy.typing import NDArray

import heinfer
from heinfer.client.environment import machine_name
from heinfer.client.local import read_memory
from heinfer.plan import read_bundle_plan
from heinfer.plan.execution import open_session
from heinfer.plan.files import HINTS_FILE
from heinfer.processes import child_environment, core_count

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from tests.coverage.light_models import NAMES, image, light_model, with_logits  # noqa: E402

BERT = "bert_encoder"
MOBILENET = "mobilenet_v2"
MODELS = (*NAMES, BERT, MOBILENET)
ENCRYPTED = ("squeezenet", "shufflenet", "densenet121", "resnet50", BERT, MOBILENET)
QUERIES = 5
#: What a pool of `QUERIES` gets to fill up, in times of preparing one.
FILL = 3.0
#: How often memory is looked at.
POLL_S = 0.02


def partition(model: Path, bundle: Path) -> dict[str, Any]:
    """Run `heinfer partition`; return what it took and what it made."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "heinfer.cli.main", "partition", str(model), "-o", str(bundle)]
    process = subprocess.Popen(command, env=child_environment(), stdout=subprocess.DEVNULL)
    peak_bytes = anonymous_bytes = 0
    while process.poll() is None:
        with suppress(OSError):  # it has ended meanwhile
            peak_bytes = max(peak_bytes, read_memory(process.pid, "VmHWM"))  # wait4's is this process's before exec
            anonymous_bytes = max(anonymous_bytes, read_memory(process.pid, "RssAnon"))
        time.sleep(POLL_S)
    if process.returncode:
        raise SystemExit(f"heinfer partition {model} failed")
    plan = read_bundle_plan(bundle)
    return {
        "partition_s": time.perf_counter() - started,
        "partition_peak_bytes": peak_bytes,
        "partition_anonymous_bytes": anonymous_bytes,
        "rounds": plan.rounds,
        "blocks": len(plan.blocks),
        "hint_bytes": (bundle / "node" / HINTS_FILE).stat().st_size,
        "server_bytes": _size(bundle / "server"),
        "node_bytes": _size(bundle / "node"),
        "bundle_bytes": _size(bundle),
    }


def query(model: bytes, logits: str, sample: NDArray[Any], bundle: Path) -> dict[str, Any]:
    """Answer samples together under encryption, several times; compare and return what it took."""
    session = open_session(model, core_count())
    name = session.get_inputs()[0].name
    plain, wanted = [], []
    for _ in range(QUERIES):
        started = time.perf_counter()
        wanted = [session.run([logits], {name: one[None]})[0] for one in sample]  # the original's batch may be fixed
        plain.append(time.perf_counter() - started)
    want, feeds, samples = np.concatenate(wanted), {name: sample}, len(sample)
    online, found = [], []
    with heinfer.local(bundle, mode="prepared", prepared=QUERIES * samples) as served:
        preparation_s = served.query(feeds, statistics=True).statistics["background_s"]
        for number in range(QUERIES):
            if number == 0 or samples > 1:
                time.sleep(FILL * QUERIES * samples * preparation_s)
            started = time.perf_counter()
            answer = served.query(feeds, statistics=True)
            online.append(time.perf_counter() - started)
            found.append(answer.statistics)
        peaks = {role.name: role.peak_memory_bytes() for role in served.roles}
        afterwards = {role.name: read_memory(role.pid, "RssAnon") for role in served.roles}
        start_s = served.start_s
    got = answer.outputs[logits]
    blocks = found[-1]["blocks"]
    return {
        "samples": samples,
        "plain_s": float(np.median(plain)),
        "online_s": float(np.median(online)),
        "preparation_s": found[-1]["background_s"],
        "queries_that_missed_the_pool": sum(samples - s["pooled"] for s in found),
        "start_s": start_s,
        "server_s": float(np.median([sum(b["server_s"] for b in s["blocks"]) for s in found])),
        "node_operators_s": float(np.median([s["node_s"] for s in found])),
        "encrypt_s": float(np.median([sum(b["encrypt_s"] for b in s["blocks"]) for s in found])),
        "decrypt_s": float(np.median([sum(b["decrypt_s"] for b in s["blocks"]) for s in found])),
        "bytes_up": sum(b["bytes_up"] for b in blocks),
        "bytes_down": sum(b["bytes_down"] for b in blocks),
        "largest_logit": float(np.max(np.abs(want))),
        "relative_error": float(np.max(np.abs(got - want)) / np.max(np.abs(want))),
        "same_top_1": bool(np.array_equal(np.argmax(got, axis=-1), np.argmax(want, axis=-1))),
        "peak_memory_bytes": peaks,
        "anonymous_bytes_afterwards": afterwards,
    }


def build(name: str, samples: int = 1) -> tuple[onnx.ModelProto, str, NDArray[Any]]:
    """Return a model, the result that is compared, and samples."""
    if name == BERT:
        model = bert_encoder()
        return model, str(model.graph.output[0].name), np.repeat(token_ids(), samples, axis=0)
    if name == MOBILENET:
        model = mobilenet_v2()
        return model, str(model.graph.output[0].name), image(samples=samples)
    model = light_model(name)
    return model, with_logits(model), image(samples=samples)


def measure(name: str, samples: int) -> dict[str, Any]:
    model, logits, sample = build(name, samples)
    content = model.SerializeToString()
    with tempfile.TemporaryDirectory() as folder:
        path, bundle = Path(folder) / f"{name}.onnx", Path(folder) / "bundle"
        path.write_bytes(content)
        figures = partition(path, bundle)
        return figures | (query(content, logits, sample, bundle) if name in ENCRYPTED else {})


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--batch", type=int, default=1, help="samples that are sent together")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    if arguments.json is not None and arguments.json.exists():
        results = json.loads(arguments.json.read_text())
    results |= {"machine": machine_name(), "cores": core_count()}
    for name in arguments.only:
        figures = results[name] = measure(name, arguments.batch)
        print(
            f"{name}: partitioned in {figures['partition_s']:.0f} s with at most "
            f"{figures['partition_peak_bytes'] / 1e9:.1f} GB (without files: "
            f"{figures['partition_anonymous_bytes'] / 1e9:.1f}), {figures['rounds']} rounds, hints "
            f"{figures['hint_bytes'] / 1e6:.0f} MB, bundle {figures['bundle_bytes'] / 1e6:.0f} MB",
            flush=True,
        )
        if name in ENCRYPTED:
            peaks = {role: round(size / 1e6) for role, size in figures["peak_memory_bytes"].items() if size}
            print(
                f"  {arguments.batch} sample(s) {figures['online_s']:.2f} s online (plain {figures['plain_s']:.3f} s), "
                f"prepared before in {figures['preparation_s']:.2f} s each, {figures['bytes_up'] / 1e6:.1f} MB up, "
                f"{figures['bytes_down'] / 1e6:.1f} MB down, error {figures['relative_error']:.1e} of the largest "
                f"value, top-1 {'equal' if figures['same_top_1'] else 'differs'}, peak memory {peaks} MB",
                flush=True,
            )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
