"""Weights and hints stay in their files: what is mapped, what is verified, what a budget of copies does."""

from __future__ import annotations

import gc
import json
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from heinfer.errors import PlanError
from heinfer.operators.backends import NativeBackend
from heinfer.operators.copies import DEFAULT_BYTES, Copies, Owner
from heinfer.plan import load_node, load_server
from heinfer.plan.mapping import MappedFile
from heinfer.server.evaluation import BlockEvaluator
from heinfer.server.service import EvaluatorService
from heinfer.wire import Address, Limits
from partitioner import partition
from tests.small_models import dense_model
from trusted_node.batches import BatchMaterials
from trusted_node.preparation import BlockMaterial, Preparer
from trusted_node.serving import loading
from trusted_node.serving.loading import Commons, LoadedModel, ModelSettings

SPEC = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


@pytest.fixture
def bundle(lenet_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(lenet_bundle, tmp_path / "bundle"))


def lies_in(array: np.ndarray, file: MappedFile) -> bool:
    """Whether an array is a view of a mapping: nothing was copied."""
    return np.shares_memory(array, np.frombuffer(file._bytes, np.uint8))


def write(path: Path, header: Any, data: bytes = bytes(4)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def write_in_place(path: Path) -> None:
    """Change the last byte of a file and keep its size; its time is another one for certain."""
    with path.open("r+b") as handle:
        handle.seek(-1, os.SEEK_END)
        last = handle.read(1)[0]
        handle.seek(-1, os.SEEK_END)
        handle.write(bytes([last ^ 1]))
    os.utime(path, ns=(1, 1))


# --- mapping -------------------------------------------------------------------------------------------------------


def test_mapped_arrays_are_those_of_the_formats_library_and_cant_be_written_to(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    kinds = ("?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8")
    wanted = {kind: generator.integers(0, 2, (3, 5)).astype(kind) for kind in kinds}
    wanted |= {"empty": np.empty((0, 7), np.int16), "scalar": np.array(7, np.int64)}
    save_file(wanted, tmp_path / "a.safetensors", metadata={"made": "by hand"})
    file = MappedFile(tmp_path / "a.safetensors")
    found = file.arrays()
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
        assert not found[name].flags.writeable
        assert array.size == 0 or lies_in(found[name], file)


def test_arrays_that_the_file_does_not_align_are_copied(tmp_path: Path) -> None:
    header = {"a": SPEC | {"shape": [3], "data_offsets": [0, 3]}, "b": {"dtype": "I32", "shape": [1]}}
    header["b"]["data_offsets"] = [3, 7]
    found = MappedFile(write(tmp_path / "a", header, b"abc" + (77).to_bytes(4, "little"))).arrays()
    assert found["b"].flags.aligned
    assert not found["b"].flags.writeable
    assert found["b"].tolist() == [77]


MALFORMED: dict[str, Any] = {
    "no JSON": b"{",
    "no object": [SPEC],
    "nested too deeply": b"[" * 100_000,
    "no text": b"\xff\xfe{}",
    "a name twice": b'{"a": ' + json.dumps(SPEC).encode() + b', "a": ' + json.dumps(SPEC).encode() + b"}",
    "no type": {"a": {"shape": [4], "data_offsets": [0, 4]}},
    "no numpy type": {"a": SPEC | {"dtype": "BF16", "shape": [2]}},
    "shape of another size": {"a": SPEC | {"shape": [5]}},
    "negative": {"a": SPEC | {"shape": [-4], "data_offsets": [4, 0]}},
    "negative twice": {"a": SPEC | {"shape": [-2, -2]}},
    "fraction": {"a": SPEC | {"shape": [4.0]}},
    "truth value": {"a": SPEC | {"shape": [True, 4]}},
    "three offsets": {"a": SPEC | {"data_offsets": [0, 4, 4]}},
    "beyond the end": {"a": SPEC | {"shape": [8], "data_offsets": [0, 8]}},
    "hole": {"a": SPEC | {"shape": [3], "data_offsets": [1, 4]}},
    "rest": {"a": SPEC | {"shape": [3], "data_offsets": [0, 3]}},
    "overlap": {"a": SPEC, "b": SPEC},
    "no entry": {"a": 7},
}


@pytest.mark.parametrize("case", MALFORMED)
def test_header_that_does_not_describe_the_file_is_refused(case: str, tmp_path: Path) -> None:
    assert MappedFile(write(tmp_path / "right", {"a": SPEC})).arrays()["a"].tolist() == [0] * 4
    with pytest.raises(PlanError, match="is not a safetensors file"):
        MappedFile(write(tmp_path / "a", MALFORMED[case])).arrays()


@settings(max_examples=30)
@given(content=st.binary(max_size=80))
def test_any_other_file_is_refused(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "anything"
    path.write_bytes(content)
    with pytest.raises(PlanError, match="is not a safetensors file"):
        MappedFile(path).arrays()


def test_what_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="is missing"):
        MappedFile(tmp_path / "a")
    (tmp_path / "link").symlink_to(write(tmp_path / "right", {"a": SPEC}))
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "."):
        with pytest.raises(PlanError, match=r"can't read|expected a plain file"):
            MappedFile(tmp_path / name)


def test_replaced_file_keeps_its_content_and_a_file_written_to_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "a", {"a": SPEC}, b"abcd")
    file = MappedFile(path)
    arrays, digest = file.arrays(), file.digest()
    write(tmp_path / "new", {"a": SPEC}, b"efgh").replace(path)
    assert arrays["a"].tobytes() == b"abcd"
    assert file.digest() == digest
    file.check_unchanged()
    second = MappedFile(path)
    second.digest()
    write_in_place(path)
    with pytest.raises(PlanError, match="was written to while it was in use"):
        second.check_unchanged()


def test_file_that_was_touched_is_read_again_once_and_stays_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a", {"a": SPEC}, b"abcd")
    file, unread, hashed = MappedFile(path), MappedFile(path), list[MappedFile]()
    file.digest()
    os.utime(path, ns=(0, 0))
    hash_content = MappedFile._hash

    def watched(self: MappedFile) -> str:
        hashed.append(self)
        return hash_content(self)

    monkeypatch.setattr(MappedFile, "_hash", watched)
    for _ in range(3):
        file.check_unchanged()
    assert hashed == [file]
    with pytest.raises(PlanError, match="was written to"):  # nobody knows what it held
        unread.check_unchanged()
    write_in_place(path)
    with pytest.raises(PlanError, match="was written to"):
        file.check_unchanged()


def test_file_that_grew_is_refused_unread(tmp_path: Path) -> None:
    path = write(tmp_path / "a", {"a": SPEC}, b"abcd")
    file = MappedFile(path)
    file.digest()
    with path.open("ab") as handle:
        handle.write(b"e")
    with pytest.raises(PlanError, match="was written to"):
        file.check_unchanged()


def test_file_that_was_written_to_is_named_once_in_the_log_and_never_to_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.safetensors", {"a": SPEC}, b"abcd")
    file = MappedFile(path)
    file.digest()
    before = path.stat()
    write_in_place(path)
    for _ in range(3):
        with pytest.raises(PlanError) as refused:
            file.check_unchanged()
        assert path.name not in str(refused.value)
        assert "/" not in str(refused.value)
        path.write_bytes(write(tmp_path / "b", {"a": SPEC}, b"abcd").read_bytes())  # copies of the other bytes remain
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert str(path) in record.getMessage()
    assert "copy the folder again" in record.getMessage()


# --- bundles -------------------------------------------------------------------------------------------------------


def test_loaded_bundles_hold_no_copy_of_weights_and_hints(lenet_bundle: Path) -> None:
    server, node = load_server(lenet_bundle / "server"), load_node(lenet_bundle / "node")
    assert server.file is not None
    assert node.hints is not None
    assert node.checks is not None
    assert all(lies_in(array, server.file) for array in server.arrays.values() if array.size)
    assert all(lies_in(hint, node.hints.file) for block in node.hints.blocks for hint in block.packed)


def test_digest_of_the_servers_folder_is_that_of_what_is_mapped(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is exchanged after it was opened, and put back for whoever reads the path."""
    path = bundle / "server" / "weights.safetensors"
    content = path.read_bytes()
    opened = MappedFile.__init__

    def exchange(self: MappedFile, name: Path) -> None:
        arrays = load_file(name)
        forged = next(array for array in arrays.values() if array.size and array.dtype == np.int16)
        forged.flat[0] ^= 1
        save_file(arrays, name)
        opened(self, name)
        name.unlink()
        name.write_bytes(content)

    monkeypatch.setattr(MappedFile, "__init__", exchange)
    with pytest.raises(PlanError, match="is not what was partitioned"):
        load_server(bundle / "server")


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_answers_are_the_same_whatever_is_kept(share: float, lenet_bundle: Path) -> None:
    """Masks, answers and corrections fit together with any budget: x = 0 gives y + correction = W(e), small."""
    server, node = load_server(lenet_bundle / "server"), load_node(lenet_bundle / "node")
    everything = Copies()
    BlockEvaluator(server, backend=NativeBackend(everything))
    assert 0 < everything.kept_bytes <= DEFAULT_BYTES
    copies, own = Copies(int(share * everything.kept_bytes)), Copies(int(share * 2**20))
    evaluator = BlockEvaluator(server, backend=NativeBackend(copies))
    blocks = evaluator.prepared
    assert blocks is not None
    preparer = Preparer(node, copies=own)
    q = node.plan.ring.modulus
    for samples in (1, 5):
        query = preparer.prepare(samples)
        for block in range(len(node.plan.blocks)):
            masks, corrections = query.material(block)
            sums = (blocks.run(block, masks.copy()) + corrections) % q
            noise = np.where(sums > q // 2, sums - q, sums)
            assert np.abs(noise).max() < 2**33  # 21 times the largest row sum, 2**28
    assert copies.kept_bytes <= copies.budget
    assert own.kept_bytes <= own.budget
    assert (copies.made > len(node.plan.blocks)) == (share < 1)


def test_server_and_node_refuse_files_that_were_written_to(bundle: Path) -> None:
    server, node = load_server(bundle / "server"), load_node(bundle / "node")
    blocks, preparer = BlockEvaluator(server).prepared, Preparer(node)
    assert blocks is not None
    up, _ = blocks.values(0)
    request = np.zeros((1, -(-up // 32) * 200), np.uint8)
    blocks.evaluate(0, request)
    preparer.prepare(1).wipe()
    names = "server/weights.safetensors", "node/hints.safetensors"
    for name in names:
        os.utime(bundle / name, ns=(2, 2))  # as a backup does
    blocks.evaluate(0, request)
    preparer.prepare(1).wipe()
    for name in names:
        write_in_place(bundle / name)
    with pytest.raises(PlanError, match="was written to while it was in use"):
        blocks.evaluate(0, request)
    with pytest.raises(PlanError, match="was written to while it was in use"):
        preparer.prepare(1)


def test_batch_hints_that_were_written_to_are_not_used(tmp_path: Path) -> None:
    partition(dense_model(tmp_path / "model.onnx"), tmp_path / "bundle", batch_hints=True)
    node = load_node(tmp_path / "bundle" / "node")
    early, late = BatchMaterials(node), BatchMaterials(node)
    first = early.of(0)
    write_in_place(tmp_path / "bundle" / "node" / "hints.safetensors")
    for _ in range(2):
        with pytest.raises(PlanError, match="was written to"):
            late.of(0)
    assert early.of(0) is first  # made of what was verified


def test_closed_preparer_leaves_no_copy_and_keeps_nothing_alive(lenet_bundle: Path) -> None:
    copies, node = Copies(), load_node(lenet_bundle / "node")
    preparer, other = Preparer(node, copies=copies), Preparer(node, copies=copies)
    total = copies.kept_bytes
    gone = weakref.ref(preparer.materials[0])
    preparer.prepare(1).wipe()
    preparer.close()
    assert 0 < copies.kept_bytes == total // 2
    preparer.prepare(1).wipe()  # a query that was late
    assert copies.kept_bytes == total // 2
    del preparer
    gc.collect()
    assert gone() is None
    other.close()
    assert copies.kept_bytes == 0


def test_copies_of_a_preparer_that_fails_are_dropped(lenet_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, node, transformed = Copies(), load_node(lenet_bundle / "node"), list[int]()
    load = BlockMaterial._load

    def fail_late(self: BlockMaterial, *arguments: Any) -> Any:
        if transformed:
            assert copies.kept_bytes > 0
            raise MemoryError
        transformed.append(1)
        return load(self, *arguments)

    monkeypatch.setattr(BlockMaterial, "_load", fail_late)
    with pytest.raises(MemoryError):
        Preparer(node, copies=copies)
    assert copies.kept_bytes == 0


def test_models_that_stop_or_fail_to_load_leave_no_copies(lenet_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = EvaluatorService(BlockEvaluator(load_server(lenet_bundle / "server")), Address("127.0.0.1", 0), Limits())
    settings = ModelSettings([service.address], prepared=1, workers=1)
    commons = Commons(settings)
    try:
        model = LoadedModel("lenet", lenet_bundle / "node", settings, commons)
        assert settings.copies.kept_bytes > 0
        model.stop(0.0)
        assert settings.copies.kept_bytes == 0

        def fail(*_: object) -> None:
            assert settings.copies.kept_bytes > 0
            raise PlanError("no such model")

        monkeypatch.setattr(loading, "_fill", fail)
        with pytest.raises(PlanError, match="no such model"):
            LoadedModel("lenet", lenet_bundle / "node", settings, commons)
        assert settings.copies.kept_bytes == 0
    finally:
        commons.close()
        service.stop(0.0)


# --- copies --------------------------------------------------------------------------------------------------------


def take(copies: Copies, owner: Owner, key: int, size: int = 10) -> None:
    with copies.use(owner, (key,), size, lambda: key) as found:
        assert found == key


def test_of_blocks_that_run_in_turn_all_that_fit_stay() -> None:
    """Dropping the least recently used would make every copy anew in every turn: 5 instead of 1 or 2."""
    copies = Copies(45)
    owner = copies.new_owner()
    for turn in range(4):
        before = copies.made
        for key in range(5):
            take(copies, owner, key)
        assert copies.made - before in ((5,) if turn == 0 else (1, 2))
        assert copies.kept_bytes <= 45


def test_copy_that_is_used_again_at_once_is_made_once() -> None:
    copies = Copies(25)
    owner = copies.new_owner()
    for key in (0, 1, 2, 2, 2, 0):
        take(copies, owner, key)
    assert copies.made == 3


def test_copy_larger_than_the_budget_is_lent_and_not_kept() -> None:
    copies = Copies(5)
    owner = copies.new_owner()
    take(copies, owner, 0)
    take(copies, owner, 0)
    assert (copies.made, copies.kept_bytes) == (2, 0)


def test_copy_in_use_is_not_dropped() -> None:
    copies = Copies(10)
    owner = copies.new_owner()
    with copies.use(owner, (0,), 10, lambda: "first") as first:
        take(copies, owner, 1)
        with copies.use(owner, (0,), 10, lambda: "second") as again:
            assert again is first
    with copies.use(owner, (0,), 10, lambda: "third") as last:
        assert last is first  # which has stayed
    assert copies.made == 2


def test_failure_to_make_a_copy_is_told_and_leaves_no_trace() -> None:
    copies = Copies(10)
    owner = copies.new_owner()

    def fail() -> int:
        raise PlanError("no such file")

    for _ in range(2):
        with pytest.raises(PlanError, match="no such file"), copies.use(owner, (0,), 10, fail):
            pass
    assert copies.kept_bytes == 0
    take(copies, owner, 0)


def test_of_threads_that_want_one_copy_one_makes_it() -> None:
    copies, start, making = Copies(10), threading.Barrier(4), threading.Event()
    owner = copies.new_owner()

    def make() -> int:
        making.wait(0.05)
        return 0

    def run(_: int) -> None:
        start.wait()
        with copies.use(owner, (0,), 10, make):
            pass

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    assert copies.made == 1


def test_threads_that_wait_for_a_copy_that_fails_make_it_themselves() -> None:
    copies, inside, waiting = Copies(10), threading.Event(), threading.Event()
    owner = copies.new_owner()

    def fail() -> int:
        inside.set()
        waiting.wait(5)
        raise PlanError("no such file")

    def first() -> None:
        with pytest.raises(PlanError, match="no such file"), copies.use(owner, (0,), 10, fail):
            pass

    def second() -> None:
        inside.wait(5)
        take(copies, owner, 0)

    jobs: list[Callable[[], None]] = [first, second]
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(job) for job in jobs]
        inside.wait(5)
        waiting.set()
        for future in futures:
            future.result(10)
    assert copies.made == 1


def keep(copies: Copies, owner: Owner, keys: Iterable[int]) -> int:
    """Use copies in turn; return how many had to be made."""
    before = copies.made
    for key in keys:
        take(copies, owner, key)
    return copies.made - before


def test_room_is_made_among_other_owners_copies_first_and_there_the_oldest() -> None:
    copies = Copies(50)
    idle, busy = copies.new_owner(), copies.new_owner()
    keep(copies, idle, range(5))
    keep(copies, busy, range(3))
    assert keep(copies, busy, range(3)) == 0
    assert keep(copies, idle, (3, 4)) == 0  # the last used of the other owner have stayed
    assert keep(copies, busy, range(3)) == 0


def test_discarded_owner_keeps_nothing_and_others_keep_theirs() -> None:
    copies = Copies(100)
    gone, other = copies.new_owner(), copies.new_owner()
    keep(copies, gone, range(3))
    keep(copies, other, range(3))
    with copies.use(gone, (0,), 10, lambda: -1) as lent:
        copies.discard(gone)
        copies.discard(gone)
        assert lent == 0
        assert copies.kept_bytes == 40  # what is in use stays until it is given back
    assert copies.kept_bytes == 30
    assert keep(copies, other, range(3)) == 0
    assert keep(copies, gone, (1, 1)) == 2
    assert copies.kept_bytes == 30
