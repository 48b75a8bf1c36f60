"""What is measured at a node with many clients: throughput, memory, overload; every answer is compared, none is lost.

    with serving(bundle) as running:                                # server and node, processes of the command line
        found = throughput(Case.of(bundle, samples), running, "http")
        found.ratio, found.tallies[-1].wrong, found.tallies[-1].lost

Each load is made by a process of its own, **which shares the machine's cores with both parties**.

An overload has queries of 64 samples: the capacity is then reached with so few queries that the load can be made, and
refused, on the machine that it shares. The node has `--queue 16` then: how long the last in the queue waits is what
decides how soon the node is as fast as before.
"""

from __future__ import annotations

import statistics
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from load_channels import LOST, OK, UNSENT
from load_clients import Ends
from serving_runs import Case, Driver, Serving, Tally, cpu_seconds, drive, resident_bytes, tally

#: Samples of a query in an overload.
OVERLOAD_BATCH = 64
#: Queries that may wait at the node then: few enough that those who come after an overload find none of them.
OVERLOAD_QUEUE = 16
#: Connections that an overload may open.
CONNECTIONS = 400
#: Seconds that the node is told a query of an overload may take.
OVERLOAD_TIMEOUT_S = 5.0
#: Queries per second of somebody who asks now and then, and for how many seconds before and after an overload.
PROBES_PER_S, PROBE_S = 10.0, 10.0
#: How long a node has to be as fast as before.
RECOVERY_S = 5.0
QUEUE_METRIC = "heinfer_node_queue_queries"
#: What "as fast as before" is: median of a second at most so many times the median before.
AS_BEFORE = 2.0


# Throughput


@dataclass(frozen=True, slots=True)
class Throughput:
    """One channel.

    Attributes:
        channel: which.
        alone: answers per second of one client, by round.
        together: the same of all clients, by round.
        ratio: of the medians.
        latency_ms: median and 95th percentile of the clients together.
        cpu_ms: CPU time by role, and of the load, for an answer of the clients together; on a machine that does
            something else too it says more than the rates.
        tallies: of all loads.
    """

    channel: str
    alone: list[float]
    together: list[float]
    ratio: float
    latency_ms: tuple[float, float]
    cpu_ms: dict[str, float]
    tallies: list[Tally]


def throughput(
    case: Case, running: Serving, channel: str, clients: int = 100, queries: int = 20, rounds: int = 3
) -> Throughput:
    """One client and many, in turn."""
    alone, together, tallies, latencies = [], [], [], []
    single = case.load(running, channel, clients=1, queries=max(queries, 10 * queries))
    many = case.load(running, channel, clients=clients, queries=queries)
    drive(case, many)  # compiles, and fills what is kept
    spent: Counter[str] = Counter()
    for _ in range(rounds):
        found, _ = drive(case, single)
        alone.append(found.rate)
        before = cpu_seconds(running)
        busy, ends = drive(case, many)
        spent.update({role: seconds - before[role] for role, seconds in cpu_seconds(running).items()})
        together.append(busy.rate)
        latencies.append(1e3 * (ends.ended - ends.due))
        tallies += [found, busy]
    spread = np.percentile(np.concatenate(latencies), (50, 95))
    return Throughput(
        channel,
        alone,
        together,
        statistics.median(together) / statistics.median(alone),
        (float(spread[0]), float(spread[1])),
        {role: 1e3 * seconds / (rounds * clients * queries) for role, seconds in spent.items()},
        tallies,
    )


# Memory


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory over many queries.

    Attributes:
        total: queries.
        bytes: by role: after each tenth of the queries, the first of which warms up.
        growth: by role: the last tenth beside the second.
        tallies: of all loads.
    """

    total: int
    bytes: dict[str, list[int]]
    growth: dict[str, float]
    tallies: list[Tally]


def memory(
    case: Case, running: Serving, total: int = 10_000, clients: int = 20, channels: tuple[str, ...] = ("http", "grpc")
) -> Memory:
    """Ask in ten parts, each over all channels in turn."""
    found: dict[str, list[int]] = {role: [] for role in running.pids}
    tallies = []
    queries = -(-total // (10 * len(channels) * clients))
    for _ in range(10):
        for channel in channels:
            tallies.append(drive(case, case.load(running, channel, clients=clients, queries=queries))[0])
        for role, pid in running.pids.items():
            found[role].append(resident_bytes(pid))
    growth = {role: sizes[-1] / sizes[1] - 1 for role, sizes in found.items()}
    return Memory(sum(t.asked for t in tallies), found, growth, tallies)


# Overload


@dataclass(frozen=True, slots=True)
class Overload:
    """Far more than the node can do, by an open loop.

    Attributes:
        capacity: queries per second of a closed loop.
        offered: queries per second.
        found: what became of them.
        queue: largest number of queries that waited, as the node's metrics say.
        before_ms: median latency of somebody who asks one at a time, before the overload.
        answered_ms: median and 95th percentile latency of the answers in the overload.
        refused_ms: the same of the refusals.
        after_ms: medians by second from the end of the overload on.
        recovered_s: until a second's median is at most `AS_BEFORE` times as long as before; None: not in `PROBE_S`.
        probes: what became of the queries of the one who asks alone: before, and from its beginning on.
    """

    capacity: float
    offered: float
    found: Tally
    queue: int
    before_ms: float
    answered_ms: tuple[float, float]
    refused_ms: tuple[float, float]
    after_ms: list[float]
    recovered_s: float | None
    probes: tuple[Tally, Tally]


def overload(
    case: Case, running: Serving, times: float = 10.0, seconds: float = 60.0, channel: str = "http",
    connections: int = CONNECTIONS,
) -> Overload:  # fmt: skip
    """Find the capacity, then offer so many times as much while somebody asks one at a time before and after."""
    closed = case.load(running, channel, clients=16, queries=20, batch=OVERLOAD_BATCH)
    drive(case, closed)
    capacity = drive(case, closed)[0].rate
    lonely = case.load(running, channel, clients=50, rate=PROBES_PER_S, seconds=PROBE_S)
    quiet, before = drive(case, lonely)
    before_ms = float(np.median(1e3 * (before.ended - before.due)))
    storm = case.load(
        running, channel, clients=connections, rate=times * capacity, seconds=seconds, batch=OVERLOAD_BATCH,
        timeout_s=OVERLOAD_TIMEOUT_S,
    )  # fmt: skip
    lonely = replace(lonely, seconds=seconds + PROBE_S)
    with watched_queue(running) as queue:
        meanwhile = Driver(lonely)
        found, ends = drive(case, storm)
        probes = meanwhile.ends()
    answered, refused = ends.kind == OK, ~np.isin(ends.kind, (OK, UNSENT, *LOST))
    after_ms, recovered = _by_second(probes, before_ms, float(ends.due.max()))
    return Overload(
        capacity=capacity,
        offered=len(ends.kind) / seconds,
        found=found,
        queue=max(queue),
        before_ms=before_ms,
        answered_ms=_spread_ms(ends, answered),
        refused_ms=_spread_ms(ends, refused),
        after_ms=after_ms,
        recovered_s=recovered,
        probes=(quiet, tally(case, lonely, probes)),
    )


def _spread_ms(ends: Ends, which: np.ndarray) -> tuple[float, float]:
    """Return median and 95th percentile of some queries' latencies; NaN where there are none."""
    latencies = 1e3 * (ends.ended - ends.due)[which]
    median, high = np.percentile(latencies, (50, 95)) if len(latencies) else (np.nan, np.nan)
    return float(median), float(high)


@contextmanager
def watched_queue(running: Serving) -> Iterator[list[int]]:
    """Read how many queries wait, as the node's metrics say, every half second; yields what was read."""
    found, over = [_queued(running)], threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            found.append(_queued(running))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        over.set()
        watcher.join()


def _queued(running: Serving) -> int:
    with urllib.request.urlopen(f"http://{running.addresses['http']}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith(f"{QUEUE_METRIC}{{")))


def _by_second(probes: Ends, before_ms: float, ended: float) -> tuple[list[float], float | None]:
    """Return medians by second after `ended`, and how long it took until one was as before."""
    good = (probes.kind == OK) & (probes.due >= ended)
    latencies, second = 1e3 * (probes.ended - probes.due)[good], np.floor(probes.due[good] - ended).astype(int)
    medians = {int(s): float(np.median(latencies[second == s])) for s in np.unique(second)}
    recovered = next((float(s + 1) for s, ms in sorted(medians.items()) if ms <= AS_BEFORE * before_ms), None)
    return list(medians.values()), recovered
