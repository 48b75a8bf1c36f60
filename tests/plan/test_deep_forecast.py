"""Forecasts of deep blocks: counts against an evaluation, what every constant does, bytes, scratch, memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from heinfer.errors import ParameterError
from heinfer.plan import DeepStep, Digests, ModelInfo, Plan, RingInfo
from heinfer.plan.deep import DeepBlock
from heinfer.plan.deep_work import DeepWork, deep_work
from heinfer.plan.forecast import WORKER_START_S, forecast, group_samples
from heinfer.plan.machine import SHIPPED, Link
from heinfer.plan.work import CHUNK_BYTES
from heinfer.ring import RingParameters, packed_bytes
from heinfer.ring.chain import ChainMatrix
from heinfer.ring.seal_chain import SealChain
from heinfer.server.polynomial.arithmetic import SealArithmetic
from heinfer.server.polynomial.counting import linear_work
from heinfer.server.polynomial.evaluator import DeepEvaluator
from heinfer.server.polynomial.files import Store, stored_bytes
from heinfer.server.polynomial.resources import DeepResources
from tests.plan.test_headroom import SCALE, Arrays, make_block
from trusted_node.deep import DeepContext

#: Constants that deep blocks have alone.
DEEP_CONSTANTS = ("chain_seal_s", "pass_s", "combine_s", "rescale_s", "switch_s")
KINDS: list[tuple[Literal["square", "polynomial"], int]] = [("square", 2), ("polynomial", 3), ("polynomial", 7)]


def count(block: DeepBlock, arrays: Arrays, workers: int = 2) -> DeepWork:
    return deep_work(block, linear_work(block, arrays, workers), CHUNK_BYTES)


def make_plan() -> tuple[Plan, DeepWork]:
    """A plan of one deep block and nothing else."""
    block, arrays = make_block()
    ring = RingParameters.default()
    plan = Plan(
        model=ModelInfo("deep", "0" * 64),
        ring=RingInfo(ring.degree, ring.modulus),
        inputs=block.inputs,
        outputs=block.outputs,
        steps=(DeepStep(0),),
        blocks=(),
        digests=Digests("0" * 64, "0" * 64),
        deep=(block,),
    )
    return plan, count(block, arrays)


class Watched:
    """Counts what an evaluation does, call by call, in residues."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, degree: int) -> None:
        self.counts: Counter[str] = Counter()
        self.degree = degree
        for name in ("multiply", "scale_by", "add", "shift", "lower", "rescale"):
            monkeypatch.setattr(SealArithmetic, name, self.around(name, getattr(SealArithmetic, name)))
        load, dump, product, create = SealChain.load, SealChain.dump, ChainMatrix.multiply, Store.create

        def loaded(chain: SealChain, residues: Any, scale: float) -> Any:
            self.counts["passed"] += residues.size
            return load(chain, residues, scale)

        def dumped(chain: SealChain, cipher: Any) -> Any:
            residues = dump(chain, cipher)
            self.counts["passed"] += residues.size
            return residues

        def multiplied(matrix: ChainMatrix, residues: Any, modulus: int, out: Any) -> None:
            self.counts["products"] += matrix._weights.size * residues.shape[1]
            self.counts["moved"] += residues.size + out.size
            product(matrix, residues, modulus, out)

        def created(store: Store) -> Any:
            made = create(store)
            there = sum(path.stat().st_size for path in store.path.parent.iterdir())
            self.counts["scratch"] = max(self.counts["scratch"], there)
            return made

        monkeypatch.setattr(SealChain, "load", loaded)
        monkeypatch.setattr(SealChain, "dump", dumped)
        monkeypatch.setattr(ChainMatrix, "multiply", multiplied)
        monkeypatch.setattr(Store, "create", created)

    def around(self, name: str, method: Any) -> Any:
        def call(arithmetic: SealArithmetic, *operands: Any) -> Any:
            size = operands[0].value.size()  # of polynomials, before a relinearisation in place
            result = method(arithmetic, *operands)
            if name == "rescale":
                primes = operands[0].primes
                self.counts["rescaled"] += self.degree * 2 * primes
                self.counts["switched"] += self.degree * 2 * primes * (primes + 1) * (size > 2)
            elif result is not operands[0]:
                self.counts["combined"] += self.degree * result.value.size() * result.primes
            return result

        return call


@pytest.mark.parametrize(("activation", "degree"), KINDS)
def test_counts_are_those_of_an_evaluation(
    activation: Literal["square", "polynomial"], degree: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, arrays = make_block(activation, degree)
    context = DeepContext(block.chain.parameters)
    secret = context.open(context.generate_secret())
    encrypted, keys = secret.encrypt(np.full((4, 1), 0.5), SCALE), secret.make_keys()
    evaluator = DeepEvaluator(block, arrays, DeepResources(tmp_path, workers=0))
    watched = Watched(monkeypatch, block.chain.degree)
    answer = evaluator.evaluate(encrypted, keys)
    found, seen = count(block, arrays), watched.counts
    assert {name: getattr(found, name) for name in ("passed", "combined", "rescaled", "switched")} == {
        name: seen[name] for name in ("passed", "combined", "rescaled", "switched")
    }
    assert found.linear.products == seen["products"]
    kept = block.chain.degree * 2 * 2 * (1 + 2)  # sums and results, which are written once more
    assert found.linear.moved == seen["moved"] + kept
    assert found.linear.scratch_bytes == seen["scratch"] == evaluator.scratch_bytes
    assert (found.encrypted, found.decrypted) == (encrypted.size + keys.size, answer.size)


def test_bytes_are_those_of_the_plan_and_scratch_is_not_less_than_keys_and_inputs() -> None:
    plan, work = make_plan()
    (block,) = plan.deep
    row, one = packed_bytes(block.chain.degree), block.chain.parameters.slots
    for groups in (1, 2, 3):
        found = forecast(plan, "standard", groups * one, SHIPPED, deep=[work])
        assert found.groups == groups
        assert (found.bytes_up, found.bytes_down) == (groups * row * block.rows_up, groups * row * block.rows_down)
        assert found.scratch_bytes == work.linear.scratch_bytes  # one upload is evaluated at a time
    assert found.scratch_bytes > stored_bytes((block.rows_up, block.chain.degree))


def test_an_upload_takes_as_long_for_one_sample_as_for_all_slots() -> None:
    plan, work = make_plan()
    slots = plan.deep[0].chain.parameters.slots
    assert group_samples(plan, "standard") == slots
    one, full, more = (forecast(plan, "standard", n, SHIPPED, deep=[work]) for n in (1, slots, slots + 1))
    assert one.server_s == full.server_s == more.server_s / 2
    assert full.online_s - full.operators_s == pytest.approx(one.online_s - one.operators_s)
    assert one.start_s == 2 * WORKER_START_S
    assert one.rounds == 1


@pytest.mark.parametrize("name", [*DEEP_CONSTANTS, "product_s", "residue_s", "byte_s", "exchange_s"])
def test_every_constant_of_deep_blocks_counts(name: str) -> None:
    plan, work = make_plan()
    slower = replace(SHIPPED, **{name: 2 * getattr(SHIPPED, name)})
    assert (
        forecast(plan, "standard", 1, slower, deep=[work]).total_s
        > forecast(plan, "standard", 1, SHIPPED, deep=[work]).total_s
    )


def test_seconds_are_the_counts_times_the_constants() -> None:
    plan, work = make_plan()
    nothing = replace(SHIPPED, **{name: 0.0 for name in asdict(SHIPPED) if name.endswith("_s")})
    for name, residues in (("switch_s", work.switched), ("rescale_s", work.rescaled), ("pass_s", work.passed)):
        for cores in (1, 4):
            machine = replace(nothing, cores=cores, **{name: 1e-6})
            (block,) = forecast(plan, "standard", 1, machine, deep=[work]).blocks
            assert block.server_s == pytest.approx(1e-6 * residues / cores)
            assert block.node_s == block.wire_s == 0


def test_a_link_adds_its_bits_and_its_round_trip() -> None:
    plan, work = make_plan()
    near = forecast(plan, "standard", 1, SHIPPED, deep=[work])
    far = forecast(plan, "standard", 1, SHIPPED, Link(1e6, 0.1), [work])
    moved = near.bytes_up + near.bytes_down + near.framing_bytes
    assert far.online_s - near.online_s == pytest.approx(0.1 + 8 * moved / 1e6)


def test_memory_has_both_parties_processes() -> None:
    plan, work = make_plan()
    found = forecast(plan, "standard", 1, SHIPPED, deep=[work])
    assert found.server_memory_bytes > work.linear.memory_bytes > 2 * 150 * 10**6
    more = forecast(plan, "standard", 1, replace(SHIPPED, cores=SHIPPED.cores + 1), deep=[work])
    assert more.node_memory_bytes > found.node_memory_bytes


def test_a_plan_whose_deep_blocks_are_not_counted_is_refused() -> None:
    plan, _ = make_plan()
    with pytest.raises(ParameterError, match="expected the work of 1 deep blocks, found 0"):
        forecast(plan, "standard", 1, SHIPPED)
