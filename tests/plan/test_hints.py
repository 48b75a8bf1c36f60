from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import numpy_helper
from safetensors.numpy import load_file, save_file

from heinfer.errors import HeinferError, PlanError
from heinfer.operators import HintKind, make_hints
from heinfer.plan import block_ring, load_node, load_server, public_polynomials, read_bundle_plan, read_plan, sealed
from heinfer.plan.files import folder_digest
from heinfer.ring import unpack
from partitioner import partition, rotate

NAME = "hints.safetensors"
PARTS = ("", "server", "node")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three blocks, with a hint of every kind, and an index map after the weights of the first."""
    generator = np.random.default_rng(0)
    proto = onnx.ModelProto(ir_version=8, opset_import=[onnx.helper.make_opsetid("", 17)])
    proto.graph.CopyFrom(
        onnx.parser.parse_graph(
            "g (float[n,2,6,6] x) => (float[n,3] y) { a = Conv (x, w, b) t = Transpose <perm = [0, 2, 3, 1]> (a) "
            "c = Relu (t) s = Mul (c, f) r = Relu (s) d = Flatten (r) e = MatMul (d, v) y = Softmax (e) }"
        )
    )
    for name, shape in {"w": (2, 2, 3, 3), "b": (2,), "f": (4, 4, 2), "v": (32, 3)}.items():
        proto.graph.initializer.append(numpy_helper.from_array(generator.normal(size=shape).astype(np.float32), name))
    path = tmp_path_factory.mktemp("model") / "small.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


@pytest.fixture(scope="module")
def original(model: Path) -> Path:
    partition(model, model.parent / "bundle")
    return model.parent / "bundle"


@pytest.fixture(scope="module")
def second(model: Path) -> Path:
    """The same model, partitioned again."""
    partition(model, model.parent / "second")
    return model.parent / "second"


@pytest.fixture
def bundle(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "bundle"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def digest(arrays: dict[str, np.ndarray]) -> np.ndarray:
    total = hashlib.sha256()
    for name in sorted(set(arrays) - {"digest"}):
        array = arrays[name]
        total.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode() + array.tobytes())
    return np.frombuffer(total.digest(), np.uint8)


def resealed(bundle: Path, edit: Callable[[dict[str, np.ndarray]], Any], name: str = NAME) -> Path:
    """Edit the hints, or the checks, and write their digest anew; returns node/."""
    path = bundle / "node" / name
    arrays = load_file(path)
    edit(arrays)
    arrays["digest"] = digest(arrays)
    save_file(arrays, path)
    return path.parent


# -- what is written ------------------------------------------------------------------------------------------------


def test_hints_of_a_bundle_are_the_weights_applied_to_its_public_polynomials(original: Path) -> None:
    server, node = load_server(original / "server"), load_node(original / "node")
    assert node.hints is not None
    assert len(node.hints.seed) == 32
    assert abs(time.time() - node.hints.created) < 600
    kinds = []
    for index, (form, found) in enumerate(zip(server.forms, node.hints.blocks, strict=True)):
        assert form is not None
        np.testing.assert_array_equal(found.form.positions, form.positions)
        np.testing.assert_array_equal(found.form.gather, form.gather)
        assert found.form.program == form.program
        ring = block_ring(node.plan, index)
        public = public_polynomials(node.plan, node.plan_hash, node.hints.seed, index)
        assert public.shape == (form.ciphertexts, form.degree)
        wanted = make_hints(form, server.arrays, public, ring)
        for hint, packed, want in zip(form.hints, found.packed, wanted, strict=True):
            kinds.append(hint.kind)
            elementwise = hint.kind is HintKind.ELEMENTWISE
            got = packed if elementwise else unpack(packed, form.degree, ring.modulus)
            np.testing.assert_array_equal(got, want, strict=True)
        stored = sum(packed.nbytes for packed in found.packed)
        info = node.plan.blocks[index].prepared
        assert info is not None
        assert info.hint_bytes == stored
    assert set(kinds) == set(HintKind)


def test_public_polynomials_differ_between_blocks_ciphertexts_seeds_and_plans(original: Path) -> None:
    node = load_node(original / "node")
    assert node.hints is not None
    seen = set()
    places = [(node.plan_hash, node.hints.seed), (node.plan_hash, bytes(32)), (bytes(32), node.hints.seed)]
    count = 0
    for plan_hash, seed in places:
        for index in range(len(node.plan.blocks)):
            for polynomial in public_polynomials(node.plan, plan_hash, seed, index):
                seen.add(polynomial.tobytes())
                count += 1
    assert len(seen) == count >= 9


def test_two_partitions_of_one_model_have_one_plan_and_different_seeds(original: Path, second: Path) -> None:
    first, other = load_node(original / "node"), load_node(second / "node")
    assert first.plan_hash == other.plan_hash
    assert first.hints is not None
    assert other.hints is not None
    assert first.hints.seed != other.hints.seed


def test_server_folder_holds_neither_seed_nor_hints(original: Path) -> None:
    node = load_node(original / "node")
    assert node.hints is not None
    secret = [node.hints.seed, *(row.tobytes() for b in node.hints.blocks for p in b.packed for row in p if row.ndim)]
    assert sorted(contents(original / "server")) == ["plan.json", "weights.safetensors"]
    for name, content in (contents(original / "server") | contents(original / "reference")).items():
        assert not any(part in content for part in secret), name


# -- what is refused ------------------------------------------------------------------------------------------------

DAMAGE: dict[str, Callable[[Path], Any]] = {
    "missing": lambda p: p.unlink(),
    "empty": lambda p: p.write_bytes(b""),
    "truncated": lambda p: p.write_bytes(p.read_bytes()[:-1]),
    "appended": lambda p: p.write_bytes(p.read_bytes() + b"x"),
    "noise": lambda p: p.write_bytes(b"\xff" * 1000),
    "a folder": lambda p: (p.unlink(), p.mkdir()),
    "a link": lambda p: (p.rename(p.parent.parent / "elsewhere"), p.symlink_to(p.parent.parent / "elsewhere")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_load_node_with_a_damaged_hints_file_is_refused_with_a_remedy(damage: str, bundle: Path) -> None:
    DAMAGE[damage](bundle / "node" / NAME)
    with pytest.raises(PlanError) as caught:
        load_node(bundle / "node")
    assert NAME in str(caught.value)
    load_server(bundle / "server")  # which needs none


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "appended", "noise"])
def test_rotation_heals_a_damaged_hints_file(damage: str, bundle: Path) -> None:
    DAMAGE[damage](bundle / "node" / NAME)
    rotate(bundle)
    assert load_node(bundle / "node").hints is not None


@pytest.mark.parametrize("share", np.linspace(0, 0.999, 40))
def test_hints_file_with_one_bit_changed_is_refused(share: float, bundle: Path) -> None:
    path = bundle / "node" / NAME
    content = bytearray(path.read_bytes())
    position = int(share * len(content))
    content[position] ^= 1 << (position % 8)
    path.write_bytes(content)
    with pytest.raises(PlanError, match=NAME):
        load_node(bundle / "node")


@pytest.mark.parametrize("name", ["seed", "plan", "created", "digest", "0.0", "1.0", "2.0"])
def test_hints_with_one_element_changed_are_refused_as_damaged(name: str, bundle: Path) -> None:
    path = bundle / "node" / NAME
    arrays = load_file(path)
    arrays[name].reshape(-1)[-1] ^= 1
    save_file(arrays, path)
    with pytest.raises(PlanError, match=r"damaged.*--rotate"):
        load_node(bundle / "node")


def map_name(arrays: dict[str, np.ndarray]) -> str:
    return next(name for name in arrays if name.startswith("map."))


MALFORMED: dict[str, Callable[[dict[str, np.ndarray]], Any]] = {
    "no seed": lambda a: a.pop("seed"),
    "no plan": lambda a: a.pop("plan"),
    "no date": lambda a: a.pop("created"),
    "short seed": lambda a: a.update(seed=a["seed"][:31]),
    "long seed": lambda a: a.update(seed=np.concatenate([a["seed"], a["seed"]])),
    "two dates": lambda a: a.update(created=np.concatenate([a["created"], a["created"]])),
    "date as float": lambda a: a.update(created=a["created"].astype(np.float64)),
    "hint missing": lambda a: a.pop("0.0"),
    "a row less": lambda a: a.update({"0.0": a["0.0"][1:]}),
    "a row more": lambda a: a.update({"0.0": np.concatenate([a["0.0"], a["0.0"][:1]])}),
    "half a row": lambda a: a.update({"0.0": np.ascontiguousarray(a["0.0"][:, :6400])}),
    "flat": lambda a: a.update({"0.0": a["0.0"].ravel()}),
    "unpacked": lambda a: a.update({"0.0": a["0.0"].astype(np.int64)}),
    "hints swapped": lambda a: a.update({"0.0": a["1.0"], "1.0": a["0.0"]}),
    "map missing": lambda a: a.pop(map_name(a)),
    "map of another type": lambda a: a.update({map_name(a): a[map_name(a)].astype(np.int64)}),
    "map of another length": lambda a: a.update({map_name(a): a[map_name(a)][1:]}),
    "map out of range": lambda a: a[map_name(a)].fill(10**6),
    "map below range": lambda a: a[map_name(a)].fill(-2),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_hints_that_do_not_fit_the_plan_are_refused_even_when_resealed(case: str, bundle: Path) -> None:
    load_node(resealed(bundle, lambda a: None))
    with pytest.raises(PlanError):
        load_node(resealed(bundle, MALFORMED[case]))


def test_hints_of_another_plan_are_refused_with_a_remedy(bundle: Path, dense_bundle: Path) -> None:
    shutil.copyfile(dense_bundle / "node" / NAME, bundle / "node" / NAME)
    with pytest.raises(PlanError, match=r"belongs to another plan.*--rotate"):
        load_node(bundle / "node")


def test_hints_of_a_second_partition_are_of_the_same_plan_and_serve(bundle: Path, second: Path) -> None:
    shutil.copyfile(second / "node" / NAME, bundle / "node" / NAME)
    assert load_node(bundle / "node").hints is not None


def edited_plans(bundle: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Edit plan.json in all three places, and seal hints and checks to it: only what the plan says is wrong."""
    for part in PARTS:
        path = bundle / part / "plan.json"
        content = json.loads(path.read_text())
        edit(content)
        path.write_text(json.dumps(content))
    plan_hash = hashlib.sha256((bundle / "plan.json").read_bytes()).digest()
    for name in (NAME, "checks.safetensors"):
        resealed(bundle, lambda a: a.update(plan=np.frombuffer(plan_hash, np.uint8)), name)


FORM_EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "smaller degree": lambda f: f.update(degree=32),
    "odd degree": lambda f: f.update(degree=3000),
    "larger degree": lambda f: f.update(degree=16384),
    "another degree": lambda f: f.update(degree=4096),
    "a dense step": lambda f: f.update(dense=[0]),
    "a dense step that is not there": lambda f: f.update(dense=[99]),
    "a row more": lambda f: f.update(rows=[f["rows"][0] + 1, *f["rows"][1:]]),
    "joined bands": lambda f: f.update(joined=1),
    "another kind": lambda f: f.update(hints=["dense"]),
    "no hints": lambda f: f.update(hints=[]),
    "two hints": lambda f: f.update(hints=f["hints"] * 2),
    "a ciphertext more": lambda f: f.update(ciphertexts=f["ciphertexts"] + 1),
    "no ciphertexts": lambda f: f.update(ciphertexts=0),
    "a value more up": lambda f: f.update(values_up=f["values_up"] + 1),
    "a value less down": lambda f: f.update(values_down=f["values_down"] - 1),
    "hint bytes": lambda f: f.update(hint_bytes=f["hint_bytes"] + 1),
}


@pytest.mark.parametrize("case", FORM_EDITS)
def test_plan_whose_prepared_form_does_not_follow_from_its_program_is_refused(case: str, bundle: Path) -> None:
    edited_plans(bundle, lambda p: p["model"].update(name="renamed"))
    load_server(bundle / "server")
    load_node(bundle / "node")
    edited_plans(bundle, lambda p: FORM_EDITS[case](p["blocks"][0]["prepared"]))
    for load, part in ((load_server, "server"), (load_node, "node")):
        with pytest.raises(PlanError, match="does not follow from its program"):
            load(bundle / part)


def test_plan_whose_prepared_form_has_a_degree_below_its_ring_is_refused(bundle: Path) -> None:
    """All its other figures follow: 1024 coefficients hold block 0 too, and would not be secure."""
    halved = {"degree": 1024, "hint_bytes": 2 * 6400}
    edited_plans(bundle, lambda p: p["blocks"][0]["prepared"].update(halved))
    with pytest.raises(HeinferError):
        load_server(bundle / "server")


@pytest.mark.parametrize(
    "edit", [{"degree": 0}, {"values_up": 0}, {"ciphertexts": -1}, {"hint_bytes": -1}, {"hints": ["magic"]}, {"x": 1}]
)
def test_plan_with_a_prepared_form_that_can_not_be_is_refused(edit: dict[str, Any], bundle: Path) -> None:
    edited_plans(bundle, lambda p: p["blocks"][0]["prepared"].update(edit))
    for load, part in ((load_server, "server"), (load_node, "node")):
        with pytest.raises(PlanError, match=r"blocks\.0"):
            load(bundle / part)


# -- rotation -------------------------------------------------------------------------------------------------------


def test_rotation_changes_seed_and_every_hint_and_nothing_else(bundle: Path) -> None:
    before, node = contents(bundle), load_node(bundle / "node")
    server = load_server(bundle / "server")
    old = load_file(bundle / "node" / NAME)
    plan = rotate(bundle)
    after, renewed = contents(bundle), load_node(bundle / "node")
    assert plan == node.plan == read_bundle_plan(bundle)
    assert sorted(before) == sorted(after)
    assert [name for name in before if before[name] != after[name]] == ["node/checks.safetensors", f"node/{NAME}"]
    assert load_server(bundle / "server").plan_hash == server.plan_hash == renewed.plan_hash
    assert node.hints is not None
    assert renewed.hints is not None
    assert renewed.hints.seed != node.hints.seed
    assert renewed.hints.created >= node.hints.created
    new = load_file(bundle / "node" / NAME)
    assert sorted(new) == sorted(old)
    for block, found in enumerate(renewed.hints.blocks):
        for number, hint in enumerate(found.form.hints):
            name = f"{block}.{number}"
            if hint.kind is HintKind.ELEMENTWISE:  # the weights
                np.testing.assert_array_equal(new[name], old[name])
            else:
                assert np.all((new[name] != old[name]).any(axis=1)), name
    for name in (n for n in new if n.startswith("map.")):
        np.testing.assert_array_equal(new[name], old[name])


def test_digest_of_node_does_not_cover_hints(bundle: Path) -> None:
    want = read_plan(bundle)[0].digests.node
    assert folder_digest(bundle / "node") == want
    rotate(bundle)
    assert folder_digest(bundle / "node") == want
    (bundle / "node" / NAME).unlink()
    assert folder_digest(bundle / "node") == want


@pytest.mark.parametrize(("age_days", "expired"), [(0, False), (29.9, False), (30.1, True), (400, True)])
def test_hints_expire_after_thirty_days(age_days: float, expired: bool, bundle: Path) -> None:
    created = int(time.time() - age_days * 24 * 3600)
    folder = resealed(bundle, lambda a: a.update(created=np.array([created])))
    found = load_node(folder).hints
    assert found is not None
    assert found.created == created
    assert found.expired == expired


def test_rotation_of_expired_hints_makes_fresh_ones(bundle: Path) -> None:
    folder = resealed(bundle, lambda a: a.update(created=np.array([0])))
    rotate(bundle)
    found = load_node(folder).hints
    assert found is not None
    assert not found.expired


EDITED_BUNDLES: dict[str, Callable[[Path], Any]] = {
    "no bundle": shutil.rmtree,
    "no plan": lambda b: (b / "plan.json").unlink(),
    "no node": lambda b: shutil.rmtree(b / "node"),
    "no plan of the node": lambda b: (b / "node" / "plan.json").unlink(),
    "no scales": lambda b: (b / "node" / "scales.safetensors").unlink(),
    "node edited": lambda b: (b / "node" / "scales.safetensors").write_bytes(b"x"),
    "a file more in node": lambda b: (b / "node" / "extra").write_bytes(b""),
    "no server": lambda b: shutil.rmtree(b / "server"),
    "server edited": lambda b: (b / "server" / "weights.safetensors").write_bytes(b"x"),
    "plans differ": lambda b: (b / "node" / "plan.json").write_bytes((b / "plan.json").read_bytes() + b"\n"),
}


@pytest.mark.parametrize("case", EDITED_BUNDLES)
def test_rotation_of_a_bundle_that_was_edited_is_refused_and_changes_nothing(case: str, bundle: Path) -> None:
    EDITED_BUNDLES[case](bundle)
    before = contents(bundle)
    with pytest.raises(PlanError):
        rotate(bundle)
    assert contents(bundle) == before


def test_rotation_of_a_bundle_without_prepared_mode_renews_its_checks(tmp_path: Path) -> None:
    proto = onnx.ModelProto(ir_version=8, opset_import=[onnx.helper.make_opsetid("", 17)])
    proto.graph.CopyFrom(
        onnx.parser.parse_graph("g (float[n,1,2,9000] x) => (float[n,1,2,8999] y) { y = Conv (x, w) }")
    )
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((1, 1, 1, 2), np.float32), "w"))
    (tmp_path / "wide.onnx").write_bytes(proto.SerializeToString())
    plan = partition(tmp_path / "wide.onnx", tmp_path / "bundle").plan
    assert not plan.has_prepared_mode
    assert not (tmp_path / "bundle" / "node" / NAME).exists()
    assert load_node(tmp_path / "bundle" / "node").hints is None
    assert load_server(tmp_path / "bundle" / "server").forms == (None,)
    before = contents(tmp_path / "bundle")
    rotate(tmp_path / "bundle")
    after = contents(tmp_path / "bundle")
    assert sorted(before) == sorted(after)
    assert [name for name in before if before[name] != after[name]] == ["node/checks.safetensors"]
    load_node(tmp_path / "bundle" / "node")


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_rotation_that_is_interrupted_leaves_the_earlier_hints(
    failure: BaseException, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(bundle)

    def half(path: Path, arrays: dict[str, np.ndarray]) -> None:
        path.write_bytes(b"half")
        raise failure

    monkeypatch.setattr(sealed, "write_arrays", half)
    with pytest.raises(type(failure)):
        rotate(bundle)
    assert contents(bundle) == before
    load_node(bundle / "node")


def test_rotation_that_was_killed_while_writing_leaves_a_node_that_loads_and_can_be_rotated(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process tidies nothing up."""
    hints = (bundle / "node" / NAME).read_bytes()

    def half(path: Path, arrays: dict[str, np.ndarray]) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sealed, "write_arrays", half)
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(OSError, match="No space"):
            rotate(bundle)
    assert (bundle / "node" / NAME).read_bytes() == hints
    load_node(bundle / "node")
    rotate(bundle)
    assert (bundle / "node" / NAME).read_bytes() != hints


def test_block_ring_of_a_block_without_prepared_mode_is_refused(original: Path) -> None:
    content = json.loads((original / "plan.json").read_text())
    content["blocks"][0]["prepared"] = None
    plan_folder = original.parent / "edited"
    plan_folder.mkdir(exist_ok=True)
    (plan_folder / "plan.json").write_text(json.dumps(content))
    with pytest.raises(HeinferError, match="no prepared mode"):
        block_ring(read_plan(plan_folder)[0], 0)
