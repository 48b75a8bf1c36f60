"""Many clients at once: every query has one end, every answer is right; and what measures this would notice.

The small version runs with every test, the acceptance itself (100 clients, 10,000 queries, a minute of overload) is
marked long. Both call benchmarks/serving_measures.py.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from heinfer.wire import Address
from tests.interfaces.fakes import FakeModels, digits_model, expected
from tests.parties import REPOSITORY
from trusted_node.serving.http_app import make_app
from trusted_node.serving.http_server import HttpServer
from trusted_node.serving.interface import QueueFullError

sys.path.append(str(REPOSITORY / "benchmarks"))
import serving_measures
from load_channels import CUT, IMPATIENT, OK, UNSENT, Load
from load_clients import Ends, run
from serving_measures import OVERLOAD_QUEUE
from serving_runs import Case, Serving, Tally, drive, resident_bytes, serving, tally

SAMPLES = REPOSITORY / "models/released/mnist_lenet5/samples.npz"
#: Throughput of many clients beside that of one, at least.
RATIO = 3.0
#: Growth of memory over 10,000 queries, at most.
GROWTH = 0.05
CHANNELS = ("http", "grpc", "frames")
#: The whole library, which is tested on its own too: only with the long tests.
TRITONCLIENT = ("tritonclient-http", "tritonclient-grpc")


def assert_all_answered(found: Tally, case: Case) -> None:
    """Nothing refused, lost or wrong."""
    assert found == replace(found, answered=found.asked, wrong=0, lost=0, refused={}, unsent=0), found
    assert found.worst <= case.tolerance


# The small version


@pytest.fixture(scope="module")
def case(lenet_bundle: Path) -> Case:
    """LeNet-5 and a thousand digits."""
    return Case.of(lenet_bundle, SAMPLES)


@pytest.fixture(scope="module")
def running(lenet_bundle: Path) -> Iterator[Serving]:
    """A node with all channels, and its server."""
    with serving(lenet_bundle) as found:
        yield found


@pytest.mark.parametrize("channel", [*CHANNELS, *(pytest.param(c, marks=pytest.mark.long) for c in TRITONCLIENT)])
def test_twenty_clients_get_what_the_plain_model_answers(case: Case, running: Serving, channel: str) -> None:
    load = case.load(running, channel, clients=20, queries=10)
    found, ends = drive(case, load)
    assert found.asked == len(ends.kind) == 200
    assert_all_answered(found, case)


def test_open_loop_at_a_leisurely_rate_is_answered(case: Case, running: Serving) -> None:
    load = case.load(running, "http", clients=60, rate=20.0, seconds=2.0, batch=3, timeout_s=60.0)
    found, ends = drive(case, load)
    assert found.asked > 15
    assert ends.answers.shape == (found.asked, 3, 10)
    assert_all_answered(found, case)


def test_memory_and_queue_can_be_read(running: Serving) -> None:
    assert all(resident_bytes(pid) > 50 * 2**20 for pid in running.pids.values())
    with serving_measures.watched_queue(running) as queue:
        pass
    assert queue == [0]


# That the measures notice


def fake_load(server: HttpServer, **settings: object) -> Load:
    given = {"clients": 4, "queries": 5, **settings}
    return Load("http", str(server.address), "digits", "x", "y", str(SAMPLES), **given)  # type: ignore[arg-type]


@contextmanager
def fake_node(models: FakeModels) -> Iterator[HttpServer]:
    server = HttpServer(Address("127.0.0.1", 0), make_app(models))
    try:
        yield server
    finally:
        server.stop(0)


@pytest.fixture(scope="module")
def fake_case() -> Case:
    with np.load(SAMPLES) as archive:
        return Case(Path("none"), SAMPLES, expected(archive["x"]), 1e-4)


def measured(fake_case: Case, models: FakeModels, **settings: object) -> tuple[Tally, Ends]:
    with fake_node(models) as server:
        load = fake_load(server, **settings)
        ends = asyncio.run(run(load))
    return tally(fake_case, load, ends), ends


def test_answers_of_a_model_in_the_clear_are_right(fake_case: Case) -> None:
    found, ends = measured(fake_case, FakeModels(digits_model()), batch=2)
    assert_all_answered(found, fake_case)
    assert found.asked == 20
    assert (ends.ended > ends.due).all()


def test_answer_to_another_query_is_wrong(fake_case: Case) -> None:
    found, ends = measured(fake_case, FakeModels(digits_model()))
    swapped = replace(ends, answers=np.roll(ends.answers, 1, axis=0))
    load = Load("http", "", "", "", "", str(SAMPLES), clients=4, queries=5)
    assert tally(fake_case, load, swapped).wrong == found.asked
    spoilt = ends.answers.copy()
    spoilt[3, 0, 0] = np.nan
    assert tally(fake_case, load, replace(ends, answers=spoilt)).wrong == 1


def test_query_without_an_end_is_lost(fake_case: Case) -> None:
    found, ends = measured(fake_case, FakeModels(digits_model()))
    cut = Ends(ends.kind[:-2], ends.due[:-2], ends.ended[:-2], ends.answers[:-2])
    load = Load("http", "", "", "", "", str(SAMPLES), clients=4, queries=5)
    assert tally(fake_case, load, cut).lost == 2
    torn = replace(ends, kind=np.array([CUT] * 3 + [OK] * 17))
    counted = tally(fake_case, load, torn)
    assert (counted.asked, counted.answered, counted.lost, counted.wrong) == (found.asked, 17, 3, 0)


def test_refusals_are_counted_by_kind(fake_case: Case) -> None:
    models = FakeModels(digits_model())
    models["digits"].refusal = QueueFullError("too many wait")
    found, _ = measured(fake_case, models)
    assert (found.answered, found.lost, sum(found.refused.values())) == (0, 0, 20)
    assert all(kind.startswith("HTTP ") for kind in found.refused)


def test_client_gives_up_at_last_and_goes_on(fake_case: Case) -> None:
    models = FakeModels(digits_model())
    models["digits"].hold()
    found, ends = measured(fake_case, models, clients=2, queries=2, patience_s=0.2)
    assert ends.kind.tolist() == [IMPATIENT] * 4
    assert found.lost == 4


def test_open_loop_does_not_wait_for_answers(fake_case: Case) -> None:
    found, ends = measured(
        fake_case, FakeModels(digits_model(delay_s=0.2)), clients=5, queries=0, rate=200.0, seconds=0.5
    )  # fmt: skip
    assert 60 < found.asked < 140
    assert 5 <= found.answered <= 20, "five connections, each good for five answers a second"
    assert found.unsent == found.asked - found.answered
    assert set(ends.kind.tolist()) == {OK, UNSENT}
    assert found.lost == found.wrong == 0


def test_nobody_there_is_lost(fake_case: Case) -> None:
    with fake_node(FakeModels(digits_model())) as server:
        load = fake_load(server, queries=1)
    assert tally(fake_case, load, asyncio.run(run(load))).lost == 4


# The acceptance


@pytest.mark.long
@pytest.mark.parametrize("channel", CHANNELS)
def test_hundred_clients_are_answered_three_times_as_fast_as_one_after_the_other(
    case: Case, running: Serving, channel: str
) -> None:
    found = serving_measures.throughput(case, running, channel, clients=100, queries=20)
    for each in found.tallies:
        assert_all_answered(each, case)
    assert found.ratio >= RATIO, found


@pytest.mark.long
@pytest.mark.timeout(900)
def test_memory_is_flat_over_ten_thousand_queries(case: Case, lenet_bundle: Path) -> None:
    with serving(lenet_bundle) as fresh:
        found = serving_measures.memory(case, fresh, 10_000)
    for each in found.tallies:
        assert_all_answered(each, case)
    assert max(found.growth.values()) < GROWTH, found


@pytest.mark.long
@pytest.mark.timeout(600)
def test_overload_is_refused_and_over_when_it_ends(case: Case, lenet_bundle: Path) -> None:
    with serving(lenet_bundle, "--queue", str(OVERLOAD_QUEUE)) as short:
        found = serving_measures.overload(case, short)
    assert found.found.answered > 0
    assert found.found.wrong == found.found.lost == 0, found
    assert sum(found.found.refused.values()) > 0, "nothing was refused: this was no overload"
    assert found.queue <= OVERLOAD_QUEUE
    assert found.recovered_s is not None, found
    assert found.recovered_s <= serving_measures.RECOVERY_S
    assert all(probe.wrong == probe.lost == 0 for probe in found.probes)
