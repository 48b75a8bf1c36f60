from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import numpy_helper
from safetensors.numpy import load_file, save_file

from heinfer.errors import HeinferError, ParameterError, PlanError
from heinfer.operators import Program
from heinfer.operators.steps import MatMul
from heinfer.plan import (
    Block,
    Digests,
    ModelInfo,
    NodeStep,
    OutputTerms,
    Plan,
    RingInfo,
    RoundStep,
    TensorSpec,
    load_node,
    load_reference,
    load_server,
    read_bundle_plan,
    read_plan,
)
from heinfer.plan.bundle import pack_terms
from heinfer.plan.checks import write_checks
from heinfer.plan.files import (
    CHECKS_FILE,
    HINTS_FILE,
    atomic_folder,
    folder_digest,
    read_arrays,
    write_arrays,
    write_file,
    write_plan,
)
from heinfer.plan.hints import write_hints
from heinfer.ring import RingParameters, RowNorms
from partitioner import partition

LOADERS = {"server": load_server, "node": load_node}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = np.random.default_rng(0)
    proto = onnx.ModelProto(ir_version=8, opset_import=[onnx.helper.make_opsetid("", 17)])
    proto.graph.CopyFrom(
        onnx.parser.parse_graph(
            "g (float[n,1,6,6] x) => (float[n,3] y) { a = Conv (x, w, b) c = Relu (a) d = Flatten (c) "
            "e = MatMul (d, v) y = Softmax (e) }"
        )
    )
    for name, shape in {"w": (2, 1, 3, 3), "b": (2,), "v": (32, 3)}.items():
        proto.graph.initializer.append(numpy_helper.from_array(generator.normal(size=shape).astype(np.float32), name))
    path = tmp_path_factory.mktemp("model") / "small.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


@pytest.fixture(scope="module")
def original(model: Path) -> Path:
    partition(model, model.parent / "bundle")
    return model.parent / "bundle"


@pytest.fixture
def bundle(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "bundle"))


def test_bundle_that_is_read_back_equals_what_was_written(model: Path, tmp_path: Path) -> None:
    result = partition(model, tmp_path / "bundle")
    plans = [read_plan(tmp_path / "bundle" / part) for part in ("", "server", "node")]
    assert plans[0] == plans[1] == plans[2]
    assert plans[0][0] == result.plan
    server, node = load_server(tmp_path / "bundle" / "server"), load_node(tmp_path / "bundle" / "node")
    assert server.plan_hash == node.plan_hash == plans[0][1]
    assert sorted(node.submodels) == [s.model for s in result.plan.steps if isinstance(s, NodeStep)]
    reference = load_reference(tmp_path / "bundle", result.plan)
    assert reference.model == model.read_bytes()


def test_two_partitions_of_one_model_have_one_plan_hash_and_equal_files(model: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        partition(model, tmp_path / name)
    files = sorted(p.relative_to(tmp_path / "first") for p in (tmp_path / "first").rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(tmp_path / "second") for p in (tmp_path / "second").rglob("*") if p.is_file())
    for file in files:
        equal = (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()
        assert equal == (file.name not in (HINTS_FILE, CHECKS_FILE)), file  # these come from fresh seeds
    assert read_plan(tmp_path / "first")[1] == read_plan(tmp_path / "second")[1]


def test_bundle_gives_neither_party_what_is_the_others(original: Path) -> None:
    server, node = load_file(original / "server" / "weights.safetensors"), load_node(original / "node")
    assert {a.dtype.kind for a in server.values()} == {"i"}  # integers: no biases, no scales
    real = load_reference(original, node.plan).arrays
    for name, array in server.items():
        assert array.shape == real[name].shape
    text = (original / "plan.json").read_text()
    assert "scale" not in text.replace('"kind": "scale"', "")
    assert not list((original / "server").glob("*.onnx"))


FILES = [
    ("server", "plan.json"),
    ("server", "weights.safetensors"),
    ("node", "plan.json"),
    ("node", "scales.safetensors"),
    ("node", "checks.safetensors"),
    ("node", "hints.safetensors"),
    ("node", "node_1.onnx"),
    ("node", "node_2.onnx"),
]


def test_every_file_of_both_parties_is_covered_below(original: Path) -> None:
    assert sorted((part, p.name) for part in LOADERS for p in (original / part).iterdir()) == sorted(FILES)


EDITS: dict[str, Callable[[Path], Any]] = {
    "missing": lambda p: p.unlink(),
    "empty": lambda p: p.write_bytes(b""),
    "truncated": lambda p: p.write_bytes(p.read_bytes()[:-1] if p.suffix != ".json" else p.read_bytes()[:-3]),
    "appended": lambda p: p.write_bytes(p.read_bytes() + b"x"),
    "flipped": lambda p: p.write_bytes(bytes([p.read_bytes()[0] ^ 1]) + p.read_bytes()[1:]),
    "a folder": lambda p: (p.unlink(), p.mkdir()),
    "renamed": lambda p: p.rename(p.with_name("other")),
    "a link": lambda p: (p.rename(p.parent.parent / "elsewhere"), p.symlink_to(p.parent.parent / "elsewhere")),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize(("part", "name"), FILES)
def test_load_of_bundle_with_one_file_edited_is_refused(part: str, name: str, edit: str, bundle: Path) -> None:
    path = bundle / part / name
    EDITS[edit](path)
    with pytest.raises(PlanError) as caught:
        LOADERS[part](bundle / part)
    assert part in str(caught.value)


@pytest.mark.parametrize("part", LOADERS)
@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_load_of_bundle_with_one_file_more_is_refused(part: str, kind: str, bundle: Path) -> None:
    extra = bundle / part / "extra.safetensors"
    match kind:
        case "file":
            extra.write_bytes(b"")
        case "folder":
            extra.mkdir()
        case _:
            extra.symlink_to(bundle / "plan.json")
    with pytest.raises(PlanError):
        LOADERS[part](bundle / part)


@pytest.mark.parametrize("part", LOADERS)
def test_load_of_missing_folder_is_refused(part: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="is missing"):
        LOADERS[part](tmp_path / part)


@pytest.mark.parametrize("position", range(0, 400, 7))
def test_weights_changed_by_one_bit_are_refused(position: int, bundle: Path) -> None:
    path = bundle / "server" / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[position % len(content)] ^= 1 << (position % 8)
    path.write_bytes(content)
    with pytest.raises(PlanError, match="not what was partitioned"):
        load_server(bundle / "server")


def edited_plan(bundle: Path, part: str, edit: Callable[[dict[str, Any]], Any]) -> None:
    path = bundle / part / "plan.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


BAD_PLANS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "unknown field": lambda p: p.update(secret=1),
    "unknown field of a block": lambda p: p["blocks"][0].update(bias=[1]),
    "missing field": lambda p: p.pop("steps"),
    "another version": lambda p: p.update(format_version=1),
    "the version before": lambda p: p.update(format_version=5),  # whose deep blocks have no error bounds
    "ring above the table": lambda p: p["ring"].update(degree=1024),
    "composite modulus": lambda p: p["ring"].update(modulus=p["ring"]["modulus"] - 4096),
    "modulus of 60 bits": lambda p: p["ring"].update(modulus=1152921504606846883),
    "a digest that is none": lambda p: p["digests"].update(server="0"),
    "another digest": lambda p: p["digests"].update(server="0" * 64, node="0" * 64),
    "a path as file name": lambda p: next(s for s in p["steps"] if s["kind"] == "node").update(model="../a.onnx"),
    "a block that never runs": lambda p: p["steps"].pop(0),
    "a block that runs twice": lambda p: p["steps"].append(p["steps"][0]),
    "a block that does not exist": lambda p: p["steps"][0].update(blocks=[7]),
    "a tensor read too early": lambda p: p["steps"].reverse(),
    "a result that nothing makes": lambda p: p["outputs"][0].update(name="z"),
    "a shape that is not the program's": lambda p: p["blocks"][0]["inputs"][0].update(shape=[1, 6, 5]),
    "a negative shape": lambda p: p["blocks"][0]["inputs"][0].update(shape=[1, 6, -6]),
    "a step that does not fit": lambda p: p["blocks"][0]["program"]["steps"][0].update(group=2),
    "a step of unknown kind": lambda p: p["blocks"][0]["program"]["steps"][0].update(kind="magic"),
    "a negative row sum": lambda p: p["blocks"][0].update(row_sum=-1),
    "digits that the program has not": lambda p: p["blocks"][0].update(digits=2),
    "digits without end": lambda p: p["blocks"][0].update(digits=10**15),
    "no digits": lambda p: p["blocks"][0].update(digits=0),
    "digits of too many bits": lambda p: p["blocks"][0].update(digit_bits=16),
    "weights that are not there": lambda p: p["blocks"][0]["program"]["steps"][0].update(weights="other"),
}


@pytest.mark.parametrize("case", [c for c in BAD_PLANS if c != "weights that are not there"])
@pytest.mark.parametrize("part", LOADERS)
def test_load_of_plan_that_was_edited_is_refused(part: str, case: str, bundle: Path) -> None:
    edited_plan(bundle, part, BAD_PLANS[case])
    with pytest.raises((PlanError, ParameterError)):
        LOADERS[part](bundle / part)


def test_load_of_plan_with_weights_that_are_not_there_is_refused(bundle: Path) -> None:
    edited_plan(bundle, "server", BAD_PLANS["weights that are not there"])
    with pytest.raises(PlanError, match="'other' is missing"):
        load_server(bundle / "server")


def test_read_plan_says_which_field_is_wrong(bundle: Path) -> None:
    edited_plan(bundle, "", lambda p: p["ring"].update(degree="many"))
    with pytest.raises(PlanError, match=r"ring\.degree"):
        read_plan(bundle)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b"{", b"\xff\xfe", b'"' + b"a" * 10000])
def test_read_plan_of_something_else_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(PlanError):
        read_plan(tmp_path)


def test_edited_plan_has_another_hash(bundle: Path) -> None:
    before = read_plan(bundle)[1]
    edited_plan(bundle, "", lambda p: p["model"].update(name="other"))
    assert read_plan(bundle)[1] != before


def resealed(bundle: Path, edit: Callable[[dict[str, np.ndarray]], Any]) -> Path:
    """Edit the node's arrays and write digest, hints and checks anew, as a careless tool might."""
    folder = bundle / "node"
    arrays = load_file(folder / "scales.safetensors")
    edit(arrays)
    save_file(arrays, folder / "scales.safetensors")
    edited_plan(bundle, "node", lambda p: p["digests"].update(node=folder_digest(folder)))
    for write in (write_hints, write_checks):
        write(folder, *read_plan(folder), load_file(bundle / "server" / "weights.safetensors"))
    return folder


BAD_SCALES: dict[str, Callable[[dict[str, np.ndarray]], Any]] = {
    "missing": lambda a: a.pop("0.0.l1"),
    "float32": lambda a: a.update({"0.0.l1": a["0.0.l1"].astype(np.float32)}),
    "another rank": lambda a: a.update({"0.0.bias": a["0.0.bias"].ravel()}),
    "another shape": lambda a: a.update({"0.0.bias": np.zeros((3, 1, 1))}),
    "NaN": lambda a: a["0.0.bias"].fill(np.nan),
    "zero scale": lambda a: a["0.0.scale"].fill(0),
}


@pytest.mark.parametrize("case", BAD_SCALES)
def test_load_node_with_scales_that_cant_be_is_refused(case: str, bundle: Path) -> None:
    load_node(resealed(bundle, lambda a: None))
    with pytest.raises(PlanError, match=r"0\.0\."):
        load_node(resealed(bundle, BAD_SCALES[case]))


def test_load_reference_of_bundle_without_one_names_the_remedy(model: Path, tmp_path: Path) -> None:
    plan = partition(model, tmp_path / "bundle", reference=False).plan
    with pytest.raises(PlanError, match="--model"):
        load_reference(tmp_path / "bundle", plan)


@pytest.mark.parametrize("name", ["model.onnx", "blocks.json", "blocks.safetensors"])
@pytest.mark.parametrize("edit", ["missing", "empty", "truncated", "a folder"])
def test_load_reference_that_was_edited_is_refused(name: str, edit: str, bundle: Path) -> None:
    plan, _ = read_plan(bundle)
    EDITS[edit](bundle / "reference" / name)
    with pytest.raises(PlanError):
        load_reference(bundle, plan)


@pytest.mark.parametrize("shape", [(), (3,), (4, 2, 2)])
def test_packed_terms_bound_what_was_packed(shape: tuple[int, ...], tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    scale = generator.uniform(1, 2, shape[:1] + (1,) * (len(shape) - 1)) * np.ones(shape)
    terms = OutputTerms(
        generator.normal(size=shape), RowNorms(scale, *(np.asarray(generator.uniform(1, 9, shape)) for _ in range(4)))
    )
    write_arrays(tmp_path / "a.safetensors", pack_terms(0, 0, terms.compact()))
    found = read_arrays(tmp_path / "a.safetensors")
    for name, want in {"bias": terms.bias, "scale": scale}.items():
        assert found[f"0.0.{name}"].ndim == len(shape)
        np.testing.assert_array_equal(np.broadcast_to(found[f"0.0.{name}"], shape), want)
    for name in ("l1", "l2", "rounding", "input_rounding"):
        assert found[f"0.0.{name}"].ndim == len(shape)
        assert np.all(found[f"0.0.{name}"] >= getattr(terms.norms, name))


def small_plan(**changes: Any) -> Plan:
    program = Program(((3,),), (MatMul(0, "w", (2,)),), (1,))
    ring = RingParameters.default()
    x, y = TensorSpec("x", (3,)), TensorSpec("y", (2,))
    fields: dict[str, Any] = {
        "model": ModelInfo("small", "0" * 64),
        "ring": RingInfo(ring.degree, ring.modulus),
        "inputs": (x,),
        "outputs": (y,),
        "steps": (RoundStep((0,)),),
        "blocks": (Block((x,), (y,), program, 5, True, ("w (MatMul)",), 0.1, None),),
        "digests": Digests("0" * 64, "0" * 64),
    }
    return Plan(**(fields | changes))


def test_plan_written_and_read_is_equal(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.json", small_plan())
    assert read_plan(tmp_path)[0] == small_plan()


def test_plan_with_a_ring_above_the_table_is_refused_at_once() -> None:
    with pytest.raises(ParameterError):
        small_plan(ring=RingInfo(1024, RingParameters.default().modulus))


def test_atomic_folder_after_an_error_leaves_nothing(tmp_path: Path) -> None:
    def fail(work: Path) -> None:
        (work / "half").write_text("written")
        raise RuntimeError

    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "target") as work:
        fail(work)
    assert list(tmp_path.iterdir()) == []


def test_atomic_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HeinferError), atomic_folder(tmp_path / "file" / "target"):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("party", ["server", "node"])
def test_read_bundle_plan_with_another_plan_in_a_folder_is_refused(
    party: str, dense_bundle: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(dense_bundle, folder)
    read_bundle_plan(folder)
    path = folder / party / "plan.json"
    content = json.loads(path.read_text())
    content["model"]["name"] = "another"
    path.write_text(json.dumps(content))
    with pytest.raises(PlanError, match="differs"):
        read_bundle_plan(folder)


def test_write_file_that_fails_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "figures.json"
    write_file(path, b"earlier")

    def full(self: Path, content: bytes) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        write_file(path, b"later")
    assert path.read_bytes() == b"earlier"
    assert [p.name for p in tmp_path.iterdir()] == ["figures.json"]
