"""What a query will take: bytes against the protocol, shapes of the sums, units, the file of constants."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from heinfer.errors import InputError
from heinfer.plan import Plan, PreparedInfo, load_node, read_plan
from heinfer.plan import forecast as forecasts
from heinfer.plan import work as works
from heinfer.plan.forecast import FRAME_BYTES, answer_bytes, forecast, group_samples, prepared_bytes
from heinfer.plan.machine import (
    SHIPPED,
    Link,
    machine_file,
    parse_bandwidth,
    parse_duration,
    read_machine,
    write_machine,
)
from heinfer.plan.work import ModeName, prepared_work, weight_count
from heinfer.processes import core_count
from heinfer.ring import Transform
from heinfer.wire import BlockAnswer, BlockRequest, Chunk, Limits, Mode, block_shapes
from heinfer.wire.codec import encode_node_event, encode_server_event
from heinfer.wire.frames import HEADER_BYTES
from tests.plan.test_deep_forecast import DEEP_CONSTANTS
from trusted_node import engine, pool, preparation, uploads

MODES: dict[ModeName, Mode] = {"standard": Mode.STANDARD, "prepared": Mode.PREPARED, "batch": Mode.BATCH}


@pytest.fixture(scope="module")
def plan(lenet_bundle: Path) -> Plan:
    return read_plan(lenet_bundle)[0]


@pytest.fixture
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's configuration that is empty."""
    monkeypatch.delenv("HEINFER_MACHINE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "heinfer" / "machine.json"


@pytest.mark.parametrize("samples", [1, 33, 2048, 5000])
@pytest.mark.parametrize("mode", MODES)
def test_forecast_bytes_are_those_of_the_protocol_for_every_block(plan: Plan, mode: ModeName, samples: int) -> None:
    found = forecast(plan, mode, samples, SHIPPED)
    size = group_samples(plan, mode)
    groups = [min(size, samples - first) for first in range(0, samples, size)]
    assert found.groups == len(groups)
    for block, shape in zip(found.blocks, block_shapes(plan), strict=True):
        wanted = MODES[mode]
        assert block.bytes_up == sum(shape.rows_up(wanted, n) * shape.row_bytes(wanted, n) for n in groups)
        assert block.bytes_down == sum(shape.rows_down(wanted, n) * shape.row_bytes(wanted, n) for n in groups)


def test_forecast_constants_are_those_of_the_node_and_the_wire() -> None:
    assert (forecasts.GROUP_BYTES, forecasts.GROUP_SAMPLES) == (engine.PREPARED_BYTES, engine.PREPARED_SAMPLES)
    assert forecasts.GROUPS_IN_FLIGHT == engine.GROUPS_IN_FLIGHT
    assert works.TASK_ROWS == uploads.TASK_ROWS
    assert works.LANES_OF_SAMPLES == preparation._LANES_OF_SAMPLES
    assert (forecasts.POOL_ENTRIES, forecasts.POOL_BYTES) == (pool.POOL_ENTRIES, pool.POOL_BYTES)
    assert Limits().chunk_bytes == works.CHUNK_BYTES


def test_forecast_framing_is_that_of_a_request_and_its_answer() -> None:
    chunk = Chunk(77, 0, 5, bytes(1000))
    request = BlockRequest(bytes(16), bytes(32), 3, 77, 1, 5, 0, Mode.PREPARED, chunk)
    frames = [encode_node_event(request), encode_server_event(BlockAnswer(77, 5, 0.01, chunk))]
    assert sum(HEADER_BYTES + len(envelope) for envelope, _ in frames) == pytest.approx(2 * FRAME_BYTES, rel=0.1)


def test_forecast_adds_up(plan: Plan) -> None:
    found = forecast(plan, "prepared", 1, SHIPPED)
    assert found.rounds == plan.rounds
    assert found.bytes_up == sum(block.bytes_up for block in found.blocks)
    assert found.online_s == pytest.approx(found.node_s + found.server_s + found.wire_s + SHIPPED.exchange_s)
    assert found.total_s == found.online_s + found.preparation_s
    assert found.preparation_s > 0


@pytest.mark.parametrize("name", [n for n in asdict(SHIPPED) if n.endswith("_s") and n not in DEEP_CONSTANTS])
def test_forecast_every_constant_counts_in_some_mode_and_none_makes_a_query_faster(plan: Plan, name: str) -> None:
    slower = replace(SHIPPED, **{name: 2 * getattr(SHIPPED, name)})
    more = [forecast(plan, mode, 4, slower).total_s - forecast(plan, mode, 4, SHIPPED).total_s for mode in MODES]
    assert min(more) >= 0
    assert max(more) > 0


def test_forecast_more_cores_are_faster_and_more_samples_slower(plan: Plan) -> None:
    for mode in MODES:
        two, sixteen = (forecast(plan, mode, 256, replace(SHIPPED, cores=cores)) for cores in (2, 16))
        assert sixteen.total_s < two.total_s
        assert forecast(plan, mode, 5000, SHIPPED).total_s > two.total_s
    assert forecast(plan, "standard", 2048, SHIPPED).total_s < 2 * forecast(plan, "standard", 1, SHIPPED).total_s


def test_forecast_of_standard_mode_waits_for_the_worker_that_has_most_tasks(plan: Plan) -> None:
    """LeNet-5's last block decrypts 10 rows: one task, however many workers there are."""
    few = forecast(plan, "standard", 1, replace(SHIPPED, cores=1)).blocks[-1]
    many = forecast(plan, "standard", 1, replace(SHIPPED, cores=64)).blocks[-1]
    rows = plan.blocks[-1].input_rows, plan.blocks[-1].output_rows
    assert rows == (84, 10)
    spared = (84 - works.TASK_ROWS) * 2048 * SHIPPED.seal_s + 2 * SHIPPED.exchange_s
    assert few.node_s - many.node_s == pytest.approx(spared)


def test_forecast_of_standard_mode_has_workers_that_start_once_and_keeps_no_pool(plan: Plan) -> None:
    two, three = (forecast(plan, "standard", 1, replace(SHIPPED, cores=cores)) for cores in (2, 3))
    assert three.node_memory_bytes - two.node_memory_bytes == forecasts.WORKER_BYTES
    hints = sum(block.prepared.hint_bytes for block in plan.blocks if block.prepared is not None)
    answer = max(answer_bytes(plan, block, "standard", 1) for block in plan.blocks)
    assert two.node_memory_bytes < forecasts.NODE_BASE_BYTES + 2 * forecasts.WORKER_BYTES + hints + answer + 10**6
    assert two.start_s == forecasts.WORKER_START_S
    assert forecast(plan, "prepared", 1, SHIPPED).start_s == 0


def test_forecast_link_adds_its_round_trips_and_its_bits(plan: Plan) -> None:
    alone = forecast(plan, "prepared", 1, SHIPPED)
    far = forecast(plan, "prepared", 1, SHIPPED, Link(rtt_s=0.1))
    assert far.online_s == pytest.approx(alone.online_s + 0.1 * plan.rounds)
    thin = forecast(plan, "prepared", 1, SHIPPED, Link(bandwidth=1e6))
    moved = alone.bytes_up + alone.bytes_down + alone.framing_bytes
    assert thin.online_s == pytest.approx(alone.online_s + 8 * moved / 1e6)


def test_forecast_memory_holds_weights_hints_and_the_pool(plan: Plan) -> None:
    found = forecast(plan, "prepared", 1, SHIPPED)
    hints = sum(block.prepared.hint_bytes for block in plan.blocks if block.prepared is not None)
    weights = 8 * sum(weight_count(block.program) for block in plan.blocks)
    assert found.node_memory_bytes > forecasts.NODE_BASE_BYTES + hints + 16 * prepared_bytes(plan)
    assert found.server_memory_bytes > forecasts.SERVER_BASE_BYTES + weights


@pytest.mark.parametrize("mode", ["standard", "batch"])
def test_forecast_memory_holds_an_answer_of_every_group_under_way(plan: Plan, mode: ModeName) -> None:
    one, two, five = (forecast(plan, mode, n * 2048, SHIPPED).node_memory_bytes for n in (1, 2, 5))
    answer = 3456 * (12_800 + (12_800 if mode == "standard" else 0))  # 6 channels of 24x24, of 2048 residues a part
    assert two - one == answer
    assert five - one == 2 * answer  # three groups are under way at once


@pytest.mark.parametrize("samples", [4, 9, 16])
def test_forecast_of_prepared_mode_counts_the_secrets_that_a_node_transforms(
    lenet_bundle: Path, monkeypatch: pytest.MonkeyPatch, samples: int
) -> None:
    preparer, counted, forward = preparation.Preparer(load_node(lenet_bundle / "node")), [], Transform.forward

    def count(transform: Transform, polynomials: Any, **options: Any) -> Any:
        counted.append(forward(transform, polynomials, **options))
        return counted[-1]

    monkeypatch.setattr(Transform, "forward", count)
    preparer.prepare(samples).wipe()
    secrets = 0
    for material in preparer.materials:
        info = replace(PreparedInfo.of(material.form), ciphertexts=0, hints=(), rows=())  # nothing but the secrets
        secrets += prepared_work(material.form.program, info, samples, 1).transformed
    assert secrets == sum(evaluations.size for evaluations in counted)


def test_weight_count_is_that_of_lenet(plan: Plan) -> None:
    assert [weight_count(block.program) for block in plan.blocks] == [6 * 25, 6 * 16 * 25, 256 * 120, 120 * 84, 84 * 10]


@pytest.mark.parametrize(("text", "value"), [("100Mbit", 1e8), ("1.5Gbit", 1.5e9), ("64kbit", 64e3), ("0.5Gbit", 5e8)])
def test_bandwidth_is_read(text: str, value: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(value)


@pytest.mark.parametrize(("text", "value"), [("200us", 2e-4), ("1ms", 1e-3), ("1.5s", 1.5), ("0ms", 0.0)])
def test_duration_is_read(text: str, value: float) -> None:
    assert parse_duration(text) == pytest.approx(value)


@pytest.mark.parametrize(
    "text",
    ["", "100", "Mbit", "1 Gbit", "1gbit", "-1Gbit", "1e3Mbit", "1MB", "0Mbit", "\N{ARABIC-INDIC DIGIT ONE}Gbit"],
)
def test_bandwidth_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="bandwidth"):
        parse_bandwidth(text)


@pytest.mark.parametrize("text", ["", "1", "ms", "1 ms", "-1ms", "1m", "1ms ", "nanms", "1.ms"])
def test_duration_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="duration"):
        parse_duration(text)


def test_machine_without_a_file_is_the_shipped_one_with_our_cores(configuration: Path) -> None:
    assert machine_file() == configuration
    assert read_machine() == (replace(SHIPPED, cores=core_count()), None)


def test_machine_that_was_written_is_read(configuration: Path) -> None:
    machine = replace(SHIPPED, name="mine", cores=7, exchange_s=0.25)
    write_machine(machine_file(), machine)
    assert read_machine() == (machine, configuration)
    assert [path.name for path in configuration.parent.iterdir()] == ["machine.json"]


def test_machine_that_a_variable_names_is_read_and_must_exist(
    configuration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEINFER_MACHINE", str(tmp_path / "other.json"))
    with pytest.raises(InputError, match=r"other\.json"):
        read_machine()
    write_machine(tmp_path / "other.json", SHIPPED)
    assert read_machine() == (SHIPPED, tmp_path / "other.json")


@pytest.mark.parametrize("wrong", ["", "[]", '{"name": "x"}', "NaN", "-1", "1e9", '"fast"'])
def test_machine_file_that_is_none_is_refused_with_a_remedy(configuration: Path, wrong: str) -> None:
    write_machine(configuration, SHIPPED)
    if wrong and wrong[0] not in "[{":
        wrong = configuration.read_text().replace(f'"exchange_s": {SHIPPED.exchange_s}', f'"exchange_s": {wrong}')
        assert wrong != configuration.read_text()
    configuration.write_text(wrong)
    with pytest.raises(InputError, match="bench --calibrate"):
        read_machine()
