"""What a query will take, without running it: time, bytes, rounds, memory; block by block.

    plan, mode, samples --> work of every block and node step --(times the constants of a machine)--> seconds
                        --> payload of every round             --(a link)--> seconds on the wire

Payload is exact. Seconds are sums: what one thread does (scales, masks, packing) adds up and overlaps with other groups
of samples, what is cut into tiles (large products, preparation, SEAL) is shared by the cores. Memory is what is kept,
and the largest tensors under way.

Worked example: a 3x3 convolution of 16 channels of 32x32 to 16 in prepared mode. 2.4 million multiply-adds at 0.3 ns
are 0.7 ms; 18,496 residues up and 16,384 down take server and node 0.2 ms each; exchange, step and block take 1 ms.

Deep blocks are counted beside the plan, from the server's arrays (`heinfer.plan.deep_work`): a plan does not know how
many weights are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from heinfer.errors import ParameterError
from heinfer.operators import Program
from heinfer.plan.deep_work import DeepWork
from heinfer.plan.machine import Link, Machine
from heinfer.plan.schema import Block, NodeStep, Plan, PreparedInfo, RoundStep
from heinfer.plan.work import ModeName, Work, coefficient_work, prepared_work
from heinfer.ring import COEFFICIENT_BYTES, THREADED_WORK, packed_bytes

#: Header and envelope of a message, the mean of a request and its answer (`heinfer.wire`).
FRAME_BYTES: Final = 62
#: Prepared bytes, and samples, of one group: what a node takes through the plan together.
GROUP_BYTES: Final = 64 * 2**20
GROUP_SAMPLES: Final = 256
#: Groups of samples under way at once: one encrypts, one is at the server, one decrypts.
GROUPS_IN_FLIGHT: Final = 3
#: Entries that a node's pool keeps where nobody says how many, and bytes that these may take: large models have fewer.
POOL_ENTRIES: Final = 16
POOL_BYTES: Final = 2 * 2**30
#: Processes with the libraries that each party loads, kernels compiled.
NODE_BASE_BYTES: Final = 244 * 10**6
SERVER_BASE_BYTES: Final = 194 * 10**6
#: One process that encrypts in standard mode; seconds of a core until it does, Python and its libraries loaded.
WORKER_BYTES: Final = 220 * 10**6
WORKER_START_S: Final = 1.4
_RESIDUE_BYTES: Final = 8
#: A weight as it is loaded and as float64; a residue during an evaluation: packed, unpacked, limbs, result.
_WEIGHT_BYTES: Final = 16
_EVALUATION_BYTES: Final = 32
#: A coefficient of a public polynomial: evaluations, and which value lies there.
_PUBLIC_BYTES: Final = 12
#: A value under way on the node: float32 in and out, residues, float64 bounds.
_VALUE_BYTES: Final = 48


@dataclass(frozen=True, slots=True)
class BlockForecast:
    """What a block will take, all samples together.

    Attributes:
        node_s: seconds of the node: encryption and decryption.
        server_s: seconds of the server.
        wire_s: seconds between them.
        preparation_s: seconds of preparing it.
        bytes_up: payload sent.
        bytes_down: payload received.
    """

    node_s: float
    server_s: float
    wire_s: float
    preparation_s: float
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a query will take.

    Attributes:
        mode: how it runs.
        samples: how many it has.
        groups: groups of samples, which overlap.
        rounds: round trips of one group.
        online_s: seconds from query to result, masks prepared before.
        preparation_s: seconds of preparing all samples; 0 in other modes.
        start_s: seconds until worker processes are there, once, not in `online_s`; 0 where none are needed.
        operators_s: seconds of the node's own operators.
        blocks: by block; deep blocks count after the others.
        node_memory_bytes: peak of the node, its pool filled.
        server_memory_bytes: peak of the server.
        framing_bytes: sent and received beside the payload.
        scratch_bytes: files of the server at their peak, one upload of a deep block at a time; 0 where there are none.
    """

    mode: ModeName
    samples: int
    groups: int
    rounds: int
    online_s: float
    preparation_s: float
    start_s: float
    operators_s: float
    blocks: tuple[BlockForecast, ...]
    node_memory_bytes: int
    server_memory_bytes: int
    framing_bytes: int
    scratch_bytes: int = 0

    @property
    def node_s(self) -> float:
        """Seconds of the node: operators, encryption, decryption."""
        return self.operators_s + sum(block.node_s for block in self.blocks)

    @property
    def server_s(self) -> float:
        """Seconds of the server."""
        return sum(block.server_s for block in self.blocks)

    @property
    def wire_s(self) -> float:
        """Seconds between them."""
        return sum(block.wire_s for block in self.blocks)

    @property
    def total_s(self) -> float:
        """Seconds where nothing was prepared before."""
        return self.online_s + self.preparation_s

    @property
    def bytes_up(self) -> int:
        """Payload sent."""
        return sum(block.bytes_up for block in self.blocks)

    @property
    def bytes_down(self) -> int:
        """Payload received."""
        return sum(block.bytes_down for block in self.blocks)


@dataclass(frozen=True, slots=True)
class _Seconds:
    """Seconds of one thread, which other groups of samples may use the rest of the cores in; and of all cores."""

    serial: float
    shared: float = 0.0

    @property
    def total(self) -> float:
        return self.serial + self.shared


def forecast(
    plan: Plan,
    mode: ModeName,
    samples: int,
    machine: Machine,
    link: Link | None = None,
    deep: Sequence[DeepWork] = (),
) -> Forecast:
    """Forecast a query.

    Args:
        plan: the plan; it has prepared mode where that is asked for.
        mode: how the query runs.
        samples: how many it has, one at least.
        machine: constants; node and server have such a machine each, or share it.
        link: between them; None: nothing but the machine's own sockets.
        deep: what an upload of each deep block takes.

    Raises:
        ParameterError: deep blocks of the plan are not counted.
    """
    if len(deep) != len(plan.deep):
        raise ParameterError(f"forecast: expected the work of {len(plan.deep)} deep blocks, found {len(deep)}")
    link = link or Link()
    groups = -(-samples // group_samples(plan, mode))
    works = [_work(plan, block, mode, samples, _requests(plan, samples, groups)) for block in plan.blocks]
    encryption = [_encryption(work, machine) for work in works]
    evaluation = [_evaluation(work, machine) for work in works]
    trips = _round_trips(plan, groups)
    local = [machine.exchange_s * trips[i] + machine.byte_s * _payload(work) for i, work in enumerate(works)]
    remote = [link.seconds(_payload(work) + work.messages * FRAME_BYTES, trips[i]) for i, work in enumerate(works)]
    operators_s = _operators(plan, machine, samples, groups)
    uploads = [_upload(work, machine, link, groups) for work in deep]
    serial = machine.exchange_s + operators_s + sum(s.serial for s in (*encryption, *evaluation)) + sum(local)
    serial += sum(upload.serial_s for upload in uploads)
    shared = sum(s.shared for s in (*encryption, *evaluation)) + sum(upload.shared_s for upload in uploads)
    blocks = tuple(
        BlockForecast(
            node.total, server.total, here + there, _preparation(work, machine), work.bytes_up, work.bytes_down
        )
        for work, node, server, here, there in zip(works, encryption, evaluation, local, remote, strict=True)
    )
    away = sum(remote) + sum(upload.away_s for upload in uploads)
    messages = sum(work.messages for work in works) + groups * sum(work.messages for work in deep)
    return Forecast(
        mode=mode,
        samples=samples,
        groups=groups,
        rounds=plan.rounds,
        online_s=serial / min(groups, GROUPS_IN_FLIGHT, machine.cores) + shared + away,
        preparation_s=sum(block.preparation_s for block in blocks),
        start_s=_start(plan, mode),
        operators_s=operators_s,
        blocks=(*blocks, *(upload.block for upload in uploads)),
        node_memory_bytes=_node_memory(plan, mode, samples, machine),
        server_memory_bytes=_server_memory(plan, works, deep),
        framing_bytes=messages * FRAME_BYTES,
        scratch_bytes=max((work.linear.scratch_bytes for work in deep), default=0),
    )


@dataclass(frozen=True, slots=True)
class _Upload:
    """All uploads of one deep block: seconds of one thread, of all cores, of the link alone; and the sum by party."""

    serial_s: float
    shared_s: float
    away_s: float
    block: BlockForecast


def _upload(work: DeepWork, machine: Machine, link: Link, groups: int) -> _Upload:
    """Forecast the uploads of one deep block, of which the server evaluates one at a time."""
    payload = work.bytes_up + work.bytes_down
    node_s = (work.encrypted + work.decrypted) * machine.chain_seal_s / machine.cores
    piped_s = payload * machine.byte_s  # between the node and its processes
    linear = work.linear
    seal_s = work.passed * machine.pass_s + work.combined * machine.combine_s
    seal_s += work.rescaled * machine.rescale_s + work.switched * machine.switch_s
    linear_s = linear.products * machine.product_s + linear.moved * machine.residue_s
    server_s = (seal_s + linear_s + linear.units * machine.exchange_s) / machine.cores
    rows_s = payload * machine.residue_s / COEFFICIENT_BYTES  # into files, and out of them
    wire_s = machine.exchange_s + payload * machine.byte_s
    away_s = link.seconds(payload + work.messages * FRAME_BYTES, 1)
    block = BlockForecast(
        node_s=groups * (node_s + piped_s),
        server_s=groups * (server_s + rows_s),
        wire_s=groups * (wire_s + away_s),
        preparation_s=0.0,
        bytes_up=groups * work.bytes_up,
        bytes_down=groups * work.bytes_down,
    )
    return _Upload(groups * (piped_s + rows_s + wire_s), groups * (node_s + server_s), groups * away_s, block)


def _start(plan: Plan, mode: ModeName) -> float:
    """Return the seconds until worker processes are there: the node's, then the server's for deep blocks."""
    parties = 2 if plan.deep else int(mode == "standard")
    return parties * WORKER_START_S


def _requests(plan: Plan, samples: int, groups: int) -> int:
    """Return the requests for a block: groups of a plan with deep blocks are taken there in parts of N samples."""
    return -(-samples // plan.ring.degree) if plan.deep else groups


def forecast_form(program: Program, form: PreparedInfo, machine: Machine, link: Link) -> float:
    """Forecast one sample of a block in prepared mode, alone on its round: seconds online and of preparation together.

    Args:
        program: the block's server program.
        form: how it would be cut.
        machine: constants.
        link: between node and server.
    """
    work = prepared_work(program, form, 1, 1)
    away_s = machine.exchange_s + machine.byte_s * _payload(work)
    away_s += link.seconds(_payload(work) + work.messages * FRAME_BYTES, 1)
    return _encryption(work, machine).total + _evaluation(work, machine).total + _preparation(work, machine) + away_s


def group_samples(plan: Plan, mode: ModeName) -> int:
    """Return the most samples that a node takes through the plan together."""
    if plan.deep:
        return plan.deep_slots
    if mode != "prepared":
        return plan.ring.degree
    return max(1, min(GROUP_SAMPLES, GROUP_BYTES // max(1, prepared_bytes(plan))))


def prepared_bytes(plan: Plan) -> int:
    """Return what one prepared sample takes in the node's memory."""
    forms = [block.prepared for block in plan.blocks if block.prepared is not None]
    return sum(_RESIDUE_BYTES * (form.values_up + form.values_down) for form in forms)


def answer_bytes(plan: Plan, block: Block, mode: ModeName, samples: int) -> int:
    """Return the payload of a block's answer to one group of samples."""
    return _work(plan, block, mode, samples, 1).bytes_down


def _work(plan: Plan, block: Block, mode: ModeName, samples: int, groups: int) -> Work:
    if mode != "prepared":
        return coefficient_work(plan.ring, block, mode, samples, groups)
    assert block.prepared is not None  # the caller has looked
    return prepared_work(block.program, block.prepared, samples, groups)


def _round_trips(plan: Plan, groups: int) -> list[float]:
    """Return each block's share of the round trips: blocks of one round wait together."""
    trips = [0.0] * len(plan.blocks)
    for step in plan.steps:
        if isinstance(step, RoundStep):
            for block in step.blocks:
                trips[block] = groups / len(step.blocks)
    return trips


def _payload(work: Work) -> int:
    return work.bytes_up + work.bytes_down


def _operators(plan: Plan, machine: Machine, samples: int, groups: int) -> float:
    """Return the seconds of the node's steps, from the sizes of what they read and make.

    Tensors that pass between two steps of the node, and no block, are in no plan; they count as empty.
    """
    specs = [*plan.inputs, *plan.outputs, *(t for block in plan.blocks for t in (*block.inputs, *block.outputs))]
    sizes = {spec.name: prod(spec.shape) for spec in specs}
    steps = [step for step in plan.steps if isinstance(step, NodeStep)]
    values = sum(sizes.get(name, 0) for step in steps for name in (*step.inputs, *step.outputs))
    operators = sum(len(step.operators) for step in steps)
    fixed = len(steps) * machine.step_s + operators * machine.operator_s
    return groups * fixed + samples * values * machine.step_value_s


def _encryption(work: Work, machine: Machine) -> _Seconds:
    """Return what the node does with a block's ciphertexts during a query."""
    serial = work.requests * machine.node_block_s + work.up * machine.up_s + work.down * machine.down_s
    online_s = work.transformed_online * work.levels * machine.transform_s / machine.cores
    return _Seconds(serial, online_s + _sealing(work, machine))


def _sealing(work: Work, machine: Machine) -> float:
    """Return the seconds of worker processes, one a core: what the busiest does of every request, in whole tasks.

    A block of few values keeps few of them busy; that another group of samples may use the rest is not counted. All
    rows pass through pipes between the workers and the node.
    """
    coefficients = tasks = 0
    for rows, step in zip(work.sealed, work.tasks, strict=True):
        turns = -(-rows // (step * machine.cores))
        coefficients += min(rows, turns * step) * 2**work.levels
        tasks += turns
    piped_s = machine.byte_s * _payload(work) if tasks else 0.0
    return work.requests * (coefficients * machine.seal_s + tasks * machine.exchange_s) + piped_s


def _evaluation(work: Work, machine: Machine) -> _Seconds:
    """Return what the server does."""
    residues = work.residues_up + work.residues_down + work.moved
    serial = work.requests * (machine.server_block_s + work.weights * machine.weight_s)
    serial += residues * machine.residue_s
    products = work.products * machine.product_s
    if 2 * work.products < THREADED_WORK * work.requests:  # two limbs; smaller products stay on one core
        return _Seconds(serial + products)
    return _Seconds(serial, products / machine.cores)


def _preparation(work: Work, machine: Machine) -> float:
    """Return the seconds of preparing a block."""
    if not work.prepared:
        return 0.0
    products = work.transformed * work.levels * machine.transform_s + work.dense * machine.dense_s
    masks = (work.up + work.down + work.moved) * machine.mask_s
    return (work.prepared * machine.preparation_s + products + masks) / machine.cores


def _server_memory(plan: Plan, works: list[Work], deep: Sequence[DeepWork]) -> int:
    """Return the server's peak: weights as they are loaded and as they are multiplied, and one block's tensors.

    Deep blocks run in processes, which stay a while.
    """
    weights = sum(work.weights for work in works)
    tensors = max(((work.residues_up + work.residues_down) // work.requests for work in works), default=0)
    processes = max((work.linear.memory_bytes for work in deep), default=0)
    return SERVER_BASE_BYTES + weights * _WEIGHT_BYTES + tensors * _EVALUATION_BYTES + processes


def _node_memory(plan: Plan, mode: ModeName, samples: int, machine: Machine) -> int:
    """Return the node's peak: hints packed and transformed, polynomials, the pool, and a group under way.

    An upload of a deep block is kept until its answer is there: it may have to be sent again.

    In standard mode it has read hints, and prepares nothing: worker processes encrypt. There and in batches every group
    under way holds an answer until all of it has been checked.
    """
    group = min(samples, group_samples(plan, mode))
    forms = [block.prepared for block in plan.blocks if block.prepared is not None] if plan.has_prepared_mode else []
    hints = sum(form.hint_bytes for form in forms)
    kept = 0
    if mode == "standard":
        kept = machine.cores * WORKER_BYTES * (bool(plan.blocks) + bool(plan.deep)) + hints
    elif forms:
        public = sum(form.ciphertexts * form.degree for form in forms)
        entries = max(1, min(POOL_ENTRIES, POOL_BYTES // max(1, prepared_bytes(plan))))
        kept += (
            round(hints * (1 + _RESIDUE_BYTES / COEFFICIENT_BYTES))
            + public * _PUBLIC_BYTES
            + entries * prepared_bytes(plan)
        )
    if mode == "batch":
        rows = sum(block.input_rows + block.output_rows for block in plan.blocks)
        kept += rows * plan.ring.degree * _RESIDUE_BYTES
    if mode != "prepared":
        held = min(GROUPS_IN_FLIGHT, -(-samples // group))
        part = min(group, plan.ring.degree)
        kept += held * max((answer_bytes(plan, block, mode, part) for block in plan.blocks), default=0)
        row_bytes = [packed_bytes(block.chain.degree) * block.rows_up for block in plan.deep]
        kept += held * max(row_bytes, default=0)
    sizes = [block.input_rows + block.output_rows for block in plan.blocks]
    values = max(sizes + [block.input_count + block.output_count for block in plan.deep])
    return NODE_BASE_BYTES + kept + group * (values * _VALUE_BYTES + prepared_bytes(plan) * (mode == "prepared"))
