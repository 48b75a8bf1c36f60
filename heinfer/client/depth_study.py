"""The study of block depth: the same model at d = 0, 1, 2, ... all, and what each depth costs and gains.

    depth --> partition (the caller's) --> bundle --> evaluate on test data, simulated or encrypted --> DepthResult
          <-- result.json of an earlier run of the same task

A simulated study evaluates the same integers and the same polynomials in the clear: accuracy, errors, rounds and bytes
are those of encryption, and there are no times. An encrypted one runs server and node on this machine. A depth that is
finished is read again where model, data and options are the same, and one that was cut off goes on with its journal.

Bytes are those of one full batch, and exact. A deep block takes as long for one sample as for all slots, so the time
per image is stated twice: as it was measured, and with every slot filled, where the rest of the run grows with samples.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heinfer.client.environment import machine_name, versions
from heinfer.client.evaluation import Progress, chunk_samples, evaluate
from heinfer.client.journal import sample_hash
from heinfer.client.report import Report
from heinfer.errors import InputError, ParameterError, UnsupportedModelError
from heinfer.plan import Plan, read_bundle_plan
from heinfer.plan.files import write_file
from heinfer.processes import core_count
from heinfer.wire import Mode, block_shapes

#: "0" is today's hybrid, "all" the fully encrypted model.
ALL: Final = "all"
EXACT: Final = "0"
#: Takes a depth and the folder of a bundle to write; raises UnsupportedModelError or ParameterError where it can't be.
PartitionAt = Callable[[str, Path], None]


@dataclass(frozen=True, slots=True)
class DepthResult:
    """One depth.

    Attributes:
        depth: "0", "1", ... "all".
        refusal: why the model can't be partitioned at this depth; the rest is then None or 0.
        same_as: an earlier depth that gives the same blocks, whose figures these are.
        rounds: round trips of one query.
        polynomials: degree of every activation that is one, in order.
        ring: largest N of a deep block; 0 without one.
        accuracy: share of labels that the top-1 meets; None without labels.
        agreement: share of samples whose top-1 is the plain model's.
        max_error: largest difference of an output from the plain model's.
        mean_error: mean.
        calibration_gain: mean error without and with the calibration, on a few samples; None without deep blocks.
        outside: share of values of deep blocks that lie outside of the calibrated ranges.
        batch_samples: samples of a full batch.
        batch_bytes_up: bytes of one full batch, in standard mode where blocks are not deep.
        batch_bytes_down: likewise.
        mode: of the other blocks, in the run.
        batch_s: seconds of a batch as run; this and what follows is None in a simulation.
        image_s: seconds of the run over its samples.
        full_image_s: likewise with all slots of deep blocks filled.
        latency_s: one query of one sample.
        memory_bytes: peak of server and node.
    """

    depth: str
    refusal: str | None = None
    same_as: str | None = None
    rounds: int = 0
    polynomials: tuple[int, ...] = ()
    ring: int = 0
    accuracy: float | None = None
    agreement: float | None = None
    max_error: float | None = None
    mean_error: float | None = None
    calibration_gain: tuple[float, float] | None = None
    outside: float | None = None
    batch_samples: int = 0
    batch_bytes_up: int = 0
    batch_bytes_down: int = 0
    mode: str = ""
    batch_s: float | None = None
    image_s: float | None = None
    full_image_s: float | None = None
    latency_s: float | None = None
    memory_bytes: Mapping[str, int | None] | None = None


@dataclass(frozen=True, slots=True)
class StudyTask:
    """What is studied; results of another task are not taken.

    Attributes:
        model: SHA-256 of the model's file.
        test: SHA-256 of the test samples.
        calibration: SHA-256 of the calibration samples.
        samples: test samples.
        degree: of polynomials; None: chosen for each activation.
        fit: "least-squares" or "minimax".
        encrypted: whether ciphertexts were computed with.
        heinfer: version.
    """

    model: str
    test: str
    calibration: str
    samples: int
    degree: int | None
    fit: str
    encrypted: bool
    heinfer: str


@dataclass(frozen=True, slots=True)
class DepthStudy:
    """All depths of one model.

    Attributes:
        model: name.
        task: what was studied.
        accuracy_plain: of the plain model; None without labels.
        rows: by depth.
        machine: processor.
        cores: available to this process.
        versions: of heinfer, Python and the packages that matter.
    """

    model: str
    task: StudyTask
    accuracy_plain: float | None
    rows: tuple[DepthResult, ...]
    machine: str
    cores: int
    versions: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, ready for JSON."""
        return asdict(self)


def parse_depths(text: str) -> tuple[str, ...]:
    """Read depths separated by commas, such as 0,1,2,all.

    Raises:
        InputError: one is no depth, or comes twice.
    """
    depths = tuple(part.strip() for part in text.split(","))
    for depth in depths:
        if depth != ALL and not (depth.isascii() and depth.isdecimal() and str(int(depth)) == depth):
            raise InputError(f"--depths: expected numbers and all, separated by commas, found {depth!r}")
    if len(set(depths)) != len(depths):
        raise InputError(f"--depths: expected each depth once, found {text!r}")
    return depths


def make_task(
    model: str,
    test: NDArray[Any],
    calibration: Mapping[str, NDArray[Any]],
    degree: int | None,
    fit: str,
    encrypted: bool,
) -> StudyTask:
    """Return what is studied, with hashes in the place of data; `model` is a hash already."""
    together = "".join(f"{name} {sample_hash(x)}\n" for name, x in sorted(calibration.items()))
    hashed = sample_hash(np.frombuffer(together.encode(), np.uint8))
    return StudyTask(model, sample_hash(test), hashed, len(test), degree, fit, encrypted, versions()["heinfer"])


def study_depths(
    folder: Path,
    depths: Sequence[str],
    task: StudyTask,
    partition_at: PartitionAt,
    x: NDArray[Any],
    labels: NDArray[Any] | None,
    progress: Progress | None = None,
    finished: Callable[[DepthResult], None] | None = None,
) -> DepthStudy:
    """Partition and evaluate a model at every depth.

    Args:
        folder: results and bundles of each depth go there, and are found again.
        depths: as `parse_depths` returns them.
        task: what is studied.
        partition_at: partitions at a depth.
        x: test samples.
        labels: one class a sample; None where unknown.
        progress: called with (phase, done, total) as work advances.
        finished: called with every depth's result.

    Raises:
        InputError: data don't fit, or every depth is refused.
        QueryFailedError: node or server failed; what is finished is kept.
        OSError: the folder can't be written.
    """
    tell = progress or (lambda phase, done, total: None)
    rows: list[DepthResult] = []
    plans: dict[str, Plan] = {}
    name, accuracy = "", None
    for depth in depths:
        place = _Place(folder / f"depth-{depth}", task)
        try:
            plan = place.plan(depth, partition_at)
        except (UnsupportedModelError, ParameterError) as error:
            row = DepthResult(depth, refusal=str(error))
        else:
            twin = next((d for d, other in plans.items() if _same_blocks(plan, other)), None)
            plans[depth] = plan
            if twin is None:
                row, plain = place.result(depth, plan, x, labels, _phases(depth, tell))
                accuracy = plain if plain is not None else accuracy
            else:
                row = replace(next(r for r in rows if r.depth == twin), depth=depth, same_as=twin)
            name = plan.model.name
        rows.append(row)
        if finished is not None:
            finished(row)
    if not plans:
        raise InputError(f"the model can be partitioned at none of these depths: {rows[0].refusal}")
    return DepthStudy(name, task, accuracy, tuple(rows), machine_name(), core_count(), versions())


def _phases(depth: str, tell: Progress) -> Progress:
    return lambda phase, done, total: tell(f"d={depth} {phase}", done, total)


def _same_blocks(left: Plan, right: Plan) -> bool:
    return (left.steps, left.blocks, left.deep) == (right.steps, right.blocks, right.deep)


class _Place:
    """The folder of one depth: task.json, bundle/, journal, result.json. Another task's is emptied."""

    def __init__(self, folder: Path, task: StudyTask) -> None:
        self._folder = folder
        self._task = task
        if _read(folder / "task.json") != asdict(task):
            for path in (folder / "task.json", folder / "result.json", folder / "journal"):
                path.unlink(missing_ok=True)
            if (folder / "bundle").is_dir():
                shutil.rmtree(folder / "bundle")
        folder.mkdir(parents=True, exist_ok=True)

    def plan(self, depth: str, partition_at: PartitionAt) -> Plan:
        """Return the plan of this depth's bundle, which is made where it is not there."""
        bundle = self._folder / "bundle"
        if not (self._folder / "task.json").exists():  # written once the bundle is whole
            partition_at(depth, bundle)
            write_file(self._folder / "task.json", json.dumps(asdict(self._task)).encode())
        return read_bundle_plan(bundle)

    def result(
        self, depth: str, plan: Plan, x: NDArray[Any], labels: NDArray[Any] | None, tell: Progress
    ) -> tuple[DepthResult, float | None]:
        """Return this depth's result, and the plain model's accuracy."""
        kept = _read(self._folder / "result.json")
        if kept is not None:
            row = kept["row"]
            gain = row["calibration_gain"]
            row |= {"polynomials": tuple(row["polynomials"]), "calibration_gain": None if gain is None else tuple(gain)}
            return DepthResult(**row), kept["accuracy_plain"]
        encrypted = self._task.encrypted
        report = evaluate(
            self._folder / "bundle",
            x,
            labels,
            simulate=not encrypted,
            journal=self._folder / "journal" if encrypted else None,
            resume=encrypted,
            progress=tell,
        )
        found = summarise(depth, plan, report)
        content = {"row": asdict(found), "accuracy_plain": report.accuracy_plain, "report": report.to_dict()}
        write_file(self._folder / "result.json", (json.dumps(content, indent=1) + "\n").encode())
        return found, report.accuracy_plain


def _read(path: Path) -> Any:
    """Return what a JSON file of ours holds; None where there is none, or it was not written whole."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def summarise(depth: str, plan: Plan, report: Report) -> DepthResult:
    """Return the figures of one depth from its evaluation."""
    found, costs = report.polynomials, report.costs
    samples = chunk_samples(plan)
    up, down = batch_bytes(plan, samples)
    batches = -(-report.samples // samples)
    return DepthResult(
        depth=depth,
        rounds=report.rounds,
        polynomials=tuple(y.degree for block in plan.deep for y in block.layers if y.activation != "none"),
        ring=max((block.chain.degree for block in plan.deep), default=0),
        accuracy=report.accuracy_encrypted,
        agreement=report.agreement,
        max_error=report.max_abs_error,
        mean_error=report.mean_abs_error,
        calibration_gain=None if found is None else (found.uncalibrated_error[1], found.calibrated_error[1]),
        outside=None
        if found is None
        else (found.inputs_outside + found.outputs_outside) / (found.inputs + found.outputs),
        batch_samples=samples,
        batch_bytes_up=up,
        batch_bytes_down=down,
        mode=report.mode,
        batch_s=None if costs is None else costs.seconds / batches,
        image_s=None if costs is None else costs.seconds / report.samples,
        full_image_s=None if costs is None else _full_image_s(report, costs.seconds, batches, samples),
        latency_s=None if costs is None else costs.latency_s,
        memory_bytes=None if costs is None else {n: costs.peak_memory_bytes.get(n) for n in ("server", "node")},
    )


def _full_image_s(report: Report, seconds: float, batches: int, slots: int) -> float:
    """Return seconds per image where every slot holds one: deep blocks stay as they are, the rest grows."""
    deep = [block.costs for block in report.blocks if block.deep is not None and block.costs is not None]
    deep_s = min(seconds, sum(c.server_s + c.wire_s + c.node_s / report.cores for c in deep))
    return deep_s / (batches * slots) + (seconds - deep_s) / report.samples if deep else seconds / report.samples


def batch_bytes(plan: Plan, samples: int) -> tuple[int, int]:
    """Return the payload of one batch, up and down: deep blocks once, others N samples at a time in standard mode."""
    up = down = 0
    for shape in block_shapes(plan):
        mode = Mode.DEEP if shape.deep else Mode.STANDARD
        size = samples if shape.deep else min(samples, plan.ring.degree)
        times = -(-samples // size)
        up += times * shape.rows_up(mode, size) * shape.row_bytes(mode, size)
        down += times * shape.rows_down(mode, size) * shape.row_bytes(mode, size)
    return up, down
