"""Renew seed and hints of a bundle; plan and server stay as they are.

requires  server/ and node/ of one bundle, as partitioned
ensures   node/hints.safetensors from a fresh seed, written as a whole or not at all
"""

from __future__ import annotations

from pathlib import Path

from heinfer.errors import PlanError
from heinfer.plan import Plan, load_server, read_bundle_plan
from heinfer.plan.files import check_folder
from heinfer.plan.hints import has_batch_hints, write_hints


def rotate(bundle: str | Path) -> Plan:
    """Make new hints for a bundle, in the owner's domain. A running node takes them when it is started again.

    Returns:
        The plan, unchanged.

    Raises:
        PlanError: a part is missing or edited, or the plan has no prepared mode.
    """
    folder = Path(bundle)
    plan = read_bundle_plan(folder)
    if not plan.has_prepared_mode:
        raise PlanError(f"{folder} has no prepared mode: there is nothing to renew")
    server = load_server(folder / "server")
    check_folder(folder / "node", plan.digests.node)
    batch = has_batch_hints(folder / "node")
    write_hints(folder / "node", plan, server.plan_hash, server.arrays, batch)
    return plan
