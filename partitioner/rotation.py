"""Renew seeds, hints and checks of a bundle; plan and server stay as they are.

requires  server/ and node/ of one bundle, as partitioned; a key, if the bundle is signed
ensures   node/hints.safetensors and node/checks.safetensors from fresh seeds, each written as a whole or not at all
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from heinfer.errors import PlanError
from heinfer.plan import Plan, load_server, read_bundle_plan, read_plan
from heinfer.plan.checks import write_checks
from heinfer.plan.files import check_folder
from heinfer.plan.hints import has_batch_hints, write_hints
from heinfer.plan.signing import Part, TrustedKeys, read_signature

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def rotate(bundle: str | Path, *, key: Ed25519PrivateKey | None = None, trusted: TrustedKeys | None = None) -> Plan:
    """Make new hints and checks, in the owner's domain. A running node takes them when it is started again.

    Args:
        bundle: the bundle.
        key: signs node/ again; needed for a bundle that is signed.
        trusted: keys beside `key`, one of which must have signed the bundle; None: no others.

    Returns:
        The plan, unchanged.

    Raises:
        PlanError: a part is missing, edited, or signed by nobody trusted; or the bundle is signed and there is no key.
    """
    folder = Path(bundle)
    if key is not None:
        trusted = (trusted or frozenset()) | {key.public_key().public_bytes_raw()}
    elif read_signature(Part.NODE.folder(folder)) is not None:
        raise PlanError(f"{folder} is signed: give --key, so that what is renewed is signed as well")
    plan = read_bundle_plan(folder, trusted)
    server = load_server(folder / "server", trusted)
    check_folder(folder / "node", plan.digests.node)
    batch = has_batch_hints(folder / "node")
    write_hints(folder / "node", plan, server.plan_hash, server.arrays, batch)
    write_checks(folder / "node", plan, server.plan_hash, server.arrays)
    if key is not None:
        from partitioner.signing import sign_part

        check_folder(folder / "node", plan.digests.node)
        if read_plan(folder / "node")[1] != server.plan_hash:
            raise PlanError(f"{folder / 'node'} was changed meanwhile: it is not signed")
        sign_part(folder, Part.NODE, key)
    return plan
