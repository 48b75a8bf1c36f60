"""Bundles whose files are damaged or written by an enemy: they load, or are refused as a plan or a parameter.

An example is what some files of a valid, signed bundle are replaced by. Digests are made anew where that is possible,
since whoever edits a plan can do that too: what is behind them must hold by itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.numpy import load_file

from heinfer.cards import read_card
from heinfer.errors import InputError, ParameterError, PlanError
from heinfer.plan import load_node, load_reference, load_server, read_bundle_plan
from heinfer.plan.files import CHECKS_FILE, HINTS_FILE, folder_digest
from heinfer.plan.sealed import write_sealed
from heinfer.plan.signing import find_signer
from partitioner import partition
from partitioner.signing import sign_bundle
from tests.fuzz.campaign import SECONDS, campaign, run_for
from tests.fuzz.child import Child
from tests.fuzz.mutations import mutated
from tests.small_models import convolution_model

EXPECTED = (PlanError, ParameterError)
#: Where the child finds the valid bundle.
VARIABLE = "HEINFER_FUZZ_BUNDLE"
PLANS = ("plan.json", "server/plan.json", "node/plan.json")
Files = dict[str, bytes]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzzed")
    partition(convolution_model(folder / "model.onnx"), folder / "bundle")
    (folder / "bundle" / "card.json").write_text('{"name": "small", "epsilon": 3.0}')
    sign_bundle(folder / "bundle", Ed25519PrivateKey.generate())
    return folder / "bundle"


def files_of(bundle: Path) -> Files:
    return {str(p.relative_to(bundle)): p.read_bytes() for p in sorted(bundle.rglob("*")) if p.is_file()}


# -- in the child --------------------------------------------------------------------------------------------------


def load_example(path: Path) -> None:
    """Load every part of the valid bundle with the example's files in it; the target of the child."""
    replaced = {name: bytes.fromhex(content) for name, content in json.loads(path.read_bytes()).items()}
    refused: list[Exception] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(shutil.copytree(os.environ[VARIABLE], Path(scratch) / "bundle"))
        for name, content in replaced.items():
            (folder / name).write_bytes(content)
        reseal(folder)
        for load in _loads(folder):
            try:
                load()
            except EXPECTED as error:
                refused.append(error)
        with suppress(InputError):
            read_card(folder)
        with suppress(PlanError):  # what was edited after signing
            find_signer(folder)
    if refused:
        raise refused[0]


def _loads(folder: Path) -> Iterator[Callable[[], object]]:
    yield lambda: load_server(folder / "server")
    yield lambda: load_node(folder / "node")
    yield lambda: load_reference(folder, read_bundle_plan(folder))


def reseal(folder: Path) -> None:
    """Write digests that fit the files, as far as the files can be read."""
    for party in ("server", "node"):
        path = folder / party / "plan.json"
        with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            content = json.loads(path.read_bytes())
            digest = folder_digest(folder / party)
            if content["digests"][party] != digest:
                path.write_bytes(path.read_bytes().replace(content["digests"][party].encode(), digest.encode()))
    plan_hash = hashlib.sha256((folder / "node" / "plan.json").read_bytes()).digest()
    for name in (HINTS_FILE, CHECKS_FILE):
        with suppress(SafetensorError, KeyError, ValueError, AttributeError):
            arrays = load_file(folder / "node" / name)
            seed = arrays.pop("seed").tobytes()
            rest = {key: value for key, value in arrays.items() if key not in ("plan", "created", "digest")}
            write_sealed(folder / "node" / name, seed, plan_hash, rest, private=name == CHECKS_FILE)


# -- edits ---------------------------------------------------------------------------------------------------------

_VALUES: Sequence[Any] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 2**16, 2**20, 2**24, 2**31, 2**40, 2**63, 2**64, 10**30, -(2**31), 0.5,
    -0.0, 1e300, "", "x", "a\0b", "../x", "0" * 64, "conv", [], [1], [0, 0], [-1], {}, {"kind": "node"}, [[[]]],
)  # fmt: skip


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of everything in a JSON document, leaves and branches."""
    found: list[tuple[Any, Any]] = []
    pending = [tree]
    while pending:
        node = pending.pop()
        keys = node.keys() if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            found.append((node, key))
            pending.append(node[key])
    return found


def _replace_number(tree: Any, old: int, new: Any) -> None:
    for container, key in _places(tree):
        if type(container[key]) is int and container[key] == old:
            container[key] = new


@st.composite
def edited_json(draw: st.DrawFn, content: bytes) -> bytes:
    """Return a document with a few values changed: one at a time, or a number wherever it stands, so that it fits."""
    tree = json.loads(content)
    for _ in range(draw(st.integers(1, 3))):
        places = _places(tree)
        if not places:
            break
        container, key = draw(st.sampled_from(places))
        match draw(st.sampled_from(["value", "number", "number", "drop", "copy", "add"])):
            case "value":
                container[key] = draw(st.sampled_from(_VALUES))
            case "number" if type(container[key]) is int:
                _replace_number(tree, container[key], draw(st.sampled_from([v for v in _VALUES if type(v) is int])))
            case "drop":
                del container[key]
            case "copy":
                other, other_key = draw(st.sampled_from(places))
                with suppress(KeyError, IndexError):
                    container[key] = json.loads(json.dumps(other[other_key]))
            case _ if isinstance(container, list):
                container.insert(key, json.loads(json.dumps(container[key])))
            case _:
                container["extra"] = draw(st.sampled_from(_VALUES))
    return json.dumps(tree, indent=1).encode()


@st.composite
def edited_tensors(draw: st.DrawFn, content: bytes) -> bytes:
    """Return a safetensors file whose header says something else."""
    size = int.from_bytes(content[:8], "little")
    header = draw(edited_json(content[8 : 8 + size]) | mutated(content[8 : 8 + size]))
    kind = draw(st.sampled_from([None, None, b"BF16", b"F8_E4M3", b"BOOL", b"U64", b"F16", b"I4", b"C64"]))
    if kind is not None:
        for known in (b"I16", b"U8", b"F64", b"I32", b"I64"):
            header = header.replace(b'"' + known + b'"', b'"' + kind + b'"', draw(st.integers(0, 2)))
    said = draw(st.sampled_from([len(header)] * 4 + [0, size, 2**31, 2**63, 2**64 - 1]))
    return said.to_bytes(8, "little") + header + content[8 + size :]


@st.composite
def replacements(draw: st.DrawFn, valid: Mapping[str, bytes]) -> Files:
    """Return what one file, or all copies of the plan, are replaced by."""
    if draw(st.integers(0, 2)) == 0:
        plan = draw(edited_json(valid["plan.json"]) | mutated(valid["plan.json"]))
        return dict.fromkeys(PLANS, plan)
    name = draw(st.sampled_from([name for name in sorted(valid) if name not in PLANS]))
    content = valid[name]
    choices = [mutated(content), st.binary(max_size=64)]
    if name.endswith(".safetensors"):
        choices = [edited_tensors(content), edited_tensors(content), *choices]
    elif name.endswith(".json"):
        choices = [edited_json(content), edited_json(content), *choices]
    return {name: draw(st.one_of(choices))}


def encode(files: Files) -> bytes:
    return json.dumps({name: content.hex() for name, content in files.items()}).encode()


def test_example_that_replaces_nothing_is_accepted_and_edited_files_are_sealed_again(bundle: Path) -> None:
    valid = files_of(bundle)
    plan = json.loads(valid["plan.json"])
    plan["model"]["name"] = "another"
    renamed = dict.fromkeys(PLANS, json.dumps(plan).encode())
    with Child(f"{__name__}:load_example", {VARIABLE: str(bundle)}) as child:
        assert child.check(encode({})) == "accepted"
        assert child.check(encode(renamed)) == "accepted"
        assert child.check(encode({"node/plan.json": renamed["plan.json"]})) == "PlanError"


@pytest.mark.slow
@pytest.mark.fuzz
def test_any_bundle_loads_or_is_refused(bundle: Path) -> None:
    valid, outcomes = files_of(bundle), Counter[str]()
    with Child(f"{__name__}:load_example", {VARIABLE: str(bundle)}) as child:

        @campaign(20)
        @given(replacements(valid))
        def check(files: Files) -> None:
            outcomes[child.check(encode(files))] += 1

        run_for(SECONDS, check)
    print(dict(outcomes))
    assert outcomes["PlanError"] > 0
