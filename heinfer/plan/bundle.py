"""The bundle: the only thing that passes from compile time to run time.

    bundle/plan.json     the plan
    bundle/server/       plan.json, weights.safetensors: integer weights and index maps
    bundle/node/         plan.json, scales.safetensors (biases, output scales, row norms), node_<i>.onnx,
                         hints.safetensors (`heinfer.plan.hints`), checks.safetensors (`heinfer.plan.checks`)
    bundle/reference/    model.onnx as it came, blocks.json and blocks.safetensors: every block with its real weights
    bundle.sig           in bundle/, server/ and node/ of a bundle that is signed (`heinfer.plan.signing`)

Each party is given its own folder only. `reference/` is for `evaluate` and belongs to neither.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from heinfer.errors import PlanError
from heinfer.operators import PreparedForm, Program, evaluate_plain
from heinfer.plan.checks import NodeChecks, read_checks
from heinfer.plan.deep_terms import DeepTerms, read_deep_terms
from heinfer.plan.files import PLAN_FILE, check_folder, read_arrays, read_plan
from heinfer.plan.hints import NodeHints, derive_form, read_hints
from heinfer.plan.mapping import MappedFile
from heinfer.plan.schema import NodeStep, Plan
from heinfer.plan.signing import Part, TrustedKeys, check_signature
from heinfer.ring import RowNorms

WEIGHTS_FILE = "weights.safetensors"
SCALES_FILE = "scales.safetensors"
MODEL_FILE = "model.onnx"
BLOCKS_FILE = "blocks.json"
BLOCK_ARRAYS_FILE = "blocks.safetensors"
PROGRAMS: TypeAdapter[tuple[Program, ...]] = TypeAdapter(tuple[Program, ...])
_NORMS = ("scale", "l1", "l2", "rounding", "input_rounding")


@dataclass(frozen=True, slots=True)
class ServerBundle:
    """What the untrusted server loads, and how each block is cut for prepared mode.

    Arrays lie over the mapping of `file`, which is None for arrays that were never in a file.
    """

    plan: Plan
    plan_hash: bytes
    arrays: Mapping[str, NDArray[Any]]
    forms: tuple[PreparedForm | None, ...]
    file: MappedFile | None = None

    def check_unchanged(self) -> None:
        """Check that nobody has written to the file of weights since it was verified.

        Raises:
            PlanError: somebody has.
        """
        if self.file is not None:
            self.file.check_unchanged()


@dataclass(frozen=True, slots=True)
class OutputTerms:
    """What the node knows of one digit of one output of a block: one output of its program.

    Attributes:
        bias: block(0), broadcasts to the output's shape, float64; 0 for all digits but the first.
        norms: output scale and row norms; axes on which all are equal may have length 1.
    """

    bias: NDArray[np.float64]
    norms: RowNorms

    def compact(self) -> OutputTerms:
        """Return the same with length 1 where an axis is constant.

        Upper bounds may be coarser: they are the largest along every axis on which the scale is constant.
        """
        scale = _squeeze(self.norms.scale)
        axes = tuple(axis for axis, length in enumerate(scale.shape) if length == 1)
        largest = (getattr(self.norms, name).max(axis=axes, keepdims=True, initial=0.0) for name in _NORMS[1:])
        return OutputTerms(_squeeze(self.bias), RowNorms(scale, *largest))


@dataclass(frozen=True, slots=True)
class NodeBundle:
    """What the trusted node loads; `terms[block][output of its program]`, `submodels[file]` as serialised ONNX.

    `hints` is None for a plan without prepared mode, `checks` only where no server is asked (simulation).
    """

    plan: Plan
    plan_hash: bytes
    terms: tuple[tuple[OutputTerms, ...], ...]
    submodels: Mapping[str, bytes]
    hints: NodeHints | None
    checks: NodeChecks | None = None
    deep: tuple[DeepTerms, ...] = ()

    def uncalibrated(self) -> NodeBundle:
        """Return the same without the calibration of deep blocks' outputs."""
        return replace(self, deep=tuple(terms.uncalibrated() for terms in self.deep))


@dataclass(frozen=True, slots=True)
class Reference:
    """The model as it came, empty where nobody reads it, and every block with its real weights.

    Deep blocks are as the server and the node have them.
    """

    model: bytes
    programs: tuple[Program, ...]
    arrays: Mapping[str, NDArray[Any]]
    deep: tuple[DeepTerms, ...] = ()

    def evaluate_block(self, block: int, inputs: list[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
        """Evaluate a block in float64; shapes (samples, *shape)."""
        return evaluate_plain(self.programs[block], self.arrays, inputs)


def read_bundle_plan(bundle: Path, trusted: TrustedKeys | None = None) -> Plan:
    """Read the plan of a bundle and check that both parties' copies are the same.

    Args:
        bundle: the bundle's folder; server/ and node/ may be elsewhere.
        trusted: keys, one of which must have signed each folder that is there; None: no signature is asked for.

    Raises:
        PlanError: as `read_plan`, a copy differs, or a folder is not signed by anybody trusted.
        ParameterError: as `read_plan`.
    """
    parts = [part for part in Part if part is Part.BUNDLE or part.folder(bundle).is_dir()]
    for part in parts:
        check_signature(part.folder(bundle), part, trusted)
    plan, plan_hash = read_plan(bundle)
    for path in (part.folder(bundle) for part in parts if part is not Part.BUNDLE):
        if read_plan(path)[1] != plan_hash:
            raise PlanError(f"{path / PLAN_FILE} differs from {bundle / PLAN_FILE}: partition the model again")
    return plan


def load_server(folder: Path, trusted: TrustedKeys | None = None) -> ServerBundle:
    """Load the server's folder.

    Args:
        folder: server/ of a bundle.
        trusted: keys, one of which must have signed it; None: no signature is asked for.

    Raises:
        PlanError: incomplete, edited, inconsistent, or not signed by anybody trusted.
        ParameterError: parameters outside the security table.
    """
    check_signature(folder, Part.SERVER, trusted)
    plan, plan_hash = read_plan(folder)
    file = MappedFile(folder / WEIGHTS_FILE)
    check_folder(folder, plan.digests.server, [file])
    arrays = file.arrays()
    for block in plan.blocks:
        block.program.check_arrays(arrays)
    for deep in plan.deep:
        deep.check_arrays(arrays)
    forms = tuple(derive_form(block, arrays, plan.ring) for block in plan.blocks)
    return ServerBundle(plan, plan_hash, arrays, forms, file)


def load_node(folder: Path, trusted: TrustedKeys | None = None) -> NodeBundle:
    """Load the node's folder. Arguments and exceptions are those of `load_server`."""
    check_signature(folder, Part.NODE, trusted)
    plan, plan_hash = read_plan(folder)
    check_folder(folder, plan.digests.node)
    arrays = read_arrays(folder / SCALES_FILE)
    terms = tuple(
        tuple(_read_terms(arrays, index, position, s) for position, s in enumerate(block.program.output_shapes))
        for index, block in enumerate(plan.blocks)
    )
    submodels = {}
    for step in plan.steps:
        if isinstance(step, NodeStep):
            path = folder / step.model
            if not path.is_file():
                raise PlanError(f"{path} is missing; copy the folder again or partition again")
            submodels[step.model] = path.read_bytes()
    hints = read_hints(folder, plan, plan_hash) if plan.has_prepared_mode else None
    deep = tuple(read_deep_terms(arrays, index, block) for index, block in enumerate(plan.deep))
    return NodeBundle(plan, plan_hash, terms, submodels, hints, read_checks(folder, plan, plan_hash), deep)


def load_reference(bundle: Path, plan: Plan) -> Reference:
    """Load reference/ of a bundle.

    Raises:
        PlanError: there is none (`partition --no-reference`), or it belongs to another plan.
    """
    folder = bundle / "reference"
    if not folder.is_dir():
        raise PlanError(f"{folder} is missing: the bundle was made without a reference; pass --model model.onnx")
    try:
        model = (folder / MODEL_FILE).read_bytes()
        programs = PROGRAMS.validate_json((folder / BLOCKS_FILE).read_bytes())
    except (OSError, ValidationError) as error:
        raise PlanError(f"{folder} is incomplete or malformed: {error}") from error
    if hashlib.sha256(model).hexdigest() != plan.model.sha256:
        raise PlanError(f"{folder / MODEL_FILE} is not the model that was partitioned")
    arrays = read_arrays(folder / BLOCK_ARRAYS_FILE)
    own = [b.program for b in plan.blocks]
    if len(programs) != len(own) or [p.for_server(b.digits) for p, b in zip(programs, plan.blocks, strict=True)] != own:
        raise PlanError(f"{folder / BLOCKS_FILE} does not belong to the plan")
    for program in programs:
        program.check_arrays(arrays)
    deep = tuple(read_deep_terms(arrays, index, block) for index, block in enumerate(plan.deep))
    for block in plan.deep:
        block.check_arrays(arrays)
    return Reference(model, programs, arrays, deep)


def pack_terms(index: int, position: int, terms: OutputTerms) -> dict[str, NDArray[np.float64]]:
    """Return the arrays of one output of a block's program, compact ones, as `load_node` finds them."""
    norms = {f"{index}.{position}.{name}": getattr(terms.norms, name) for name in _NORMS}
    return {f"{index}.{position}.bias": terms.bias, **norms}


def _read_terms(arrays: Mapping[str, NDArray[Any]], index: int, position: int, shape: tuple[int, ...]) -> OutputTerms:
    found = {}
    for name in ("bias", *_NORMS):
        key = f"{index}.{position}.{name}"
        array = arrays.get(key)
        fits = array is not None and array.dtype == np.float64 and array.ndim == len(shape)
        if array is None or not fits or any(a not in (1, s) for a, s in zip(array.shape, shape, strict=True)):
            raise PlanError(f"{SCALES_FILE}: {key} is missing or does not fit shape {shape}")
        if not np.all(np.isfinite(array)) or (name == "scale" and np.any(array == 0)):
            raise PlanError(f"{SCALES_FILE}: {key} holds values that are not usable")
        found[name] = array
    return OutputTerms(found["bias"], RowNorms(*(found[name] for name in _NORMS)))


def _squeeze(array: NDArray[np.float64]) -> NDArray[np.float64]:
    for axis in range(array.ndim):
        first = array.take([0], axis=axis) if array.shape[axis] else array
        if array.shape[axis] > 1 and np.array_equal(np.broadcast_to(first, array.shape), array):
            array = first
    return array
