"""Signed bundles: what passes, and everything that must not."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from heinfer.cli.main import app
from heinfer.errors import InputError, PlanError
from heinfer.plan import files, load_node, load_server, read_bundle_plan
from heinfer.plan.files import SIGNATURE_FILE
from heinfer.plan.signing import Part, find_signer, fingerprint, read_signature, read_trusted_keys
from partitioner import rotate
from partitioner.signing import make_keys, read_signing_key, sign_bundle, sign_part
from tests.fuzz.mutations import mutated

KEY, OTHER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
RAW, OTHER_RAW = (key.public_key().public_bytes_raw() for key in (KEY, OTHER))
TRUSTED = frozenset({RAW})

LOADERS: dict[Part, Callable[..., Any]] = {
    Part.BUNDLE: read_bundle_plan,
    Part.SERVER: load_server,
    Part.NODE: load_node,
}
PARTS = pytest.mark.parametrize("part", Part)


@pytest.fixture(scope="module")
def signed(dense_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(dense_bundle, tmp_path_factory.mktemp("signed") / "bundle"))
    (folder / "card.json").write_text('{"name": "dense"}')
    assert sign_bundle(folder, KEY) == RAW
    return folder


@pytest.fixture
def bundle(signed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(signed, tmp_path / "bundle"))


def load(bundle: Path, part: Part, trusted: frozenset[bytes] | None = TRUSTED) -> Any:
    return LOADERS[part](part.folder(bundle), trusted)


def edit_signature(bundle: Path, part: Part, old: bytes, new: bytes) -> None:
    path = part.folder(bundle) / SIGNATURE_FILE
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))


@PARTS
def test_signed_bundle_loads_with_its_signer_trusted_and_without_any(signed: Path, part: Part) -> None:
    assert load(signed, part) is not None
    assert load(signed, part, frozenset({OTHER_RAW, RAW})) is not None
    assert load(signed, part, None) is not None
    assert find_signer(signed) == RAW


@PARTS
def test_signature_lists_every_file_with_its_digest_and_its_own_bytes_are_ed25519s(signed: Path, part: Part) -> None:
    folder = part.folder(signed)
    found = read_signature(folder)
    assert found is not None
    names = {p.name for p in folder.iterdir() if p.is_file()} - {SIGNATURE_FILE}
    if part is Part.BUNDLE:
        names |= {f"reference/{p.name}" for p in (folder / "reference").iterdir()}
    assert set(found.digests) == names
    for name in names:
        assert found.digests[name] == hashlib.sha256((folder / name).read_bytes()).hexdigest()
    lines = (folder / SIGNATURE_FILE).read_bytes().splitlines(keepends=True)
    assert lines[0] == f"heinfer-signature-1 {part.value}\n".encode()
    assert lines[-2] == b"key " + RAW.hex().encode() + b"\n"
    KEY.public_key().verify(bytes.fromhex(lines[-1].decode().split()[1]), b"".join(lines[:-1]))


@PARTS
def test_bundle_of_another_signer_is_refused(signed: Path, part: Part) -> None:
    with pytest.raises(PlanError, match=f"signed by {fingerprint(RAW)}.*not trusted.*{fingerprint(OTHER_RAW)}"):
        load(signed, part, frozenset({OTHER_RAW}))
    with pytest.raises(PlanError, match="not trusted"):
        load(signed, part, frozenset())


@PARTS
def test_unsigned_bundle_is_refused_and_nothing_else_of_it_read(
    bundle: Path, part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    (part.folder(bundle) / SIGNATURE_FILE).unlink()
    monkeypatch.setattr(files, "_read", None)
    monkeypatch.setattr(files, "load_file", None)
    with pytest.raises(PlanError, match="is not signed"):
        load(bundle, part)


@PARTS
def test_changed_plan_is_refused_before_it_is_parsed(bundle: Path, part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    path = part.folder(bundle) / "plan.json"
    path.write_bytes(path.read_bytes() + b"\n")
    monkeypatch.setattr(files, "_ADAPTER", None)
    with pytest.raises(PlanError, match=r"plan\.json is not the file that was signed"):
        load(bundle, part)


def every_file(bundle: Path) -> list[str]:
    return sorted(str(p.relative_to(bundle)) for p in bundle.rglob("*") if p.is_file() and p.name != SIGNATURE_FILE)


def part_of(name: str) -> Part:
    first = name.partition("/")[0]
    return Part(first) if first in ("server", "node") else Part.BUNDLE


EDITS: dict[str, Callable[[Path], Any]] = {
    "flipped": lambda p: p.write_bytes(bytes([p.read_bytes()[0] ^ 1]) + p.read_bytes()[1:]),
    "appended": lambda p: p.write_bytes(p.read_bytes() + b" "),
    "missing": lambda p: p.unlink(),
    "a folder": lambda p: (p.unlink(), p.mkdir()),
    "a link": lambda p: (p.rename(p.parent.parent / "elsewhere"), p.symlink_to(p.parent.parent / "elsewhere")),
}


@pytest.mark.parametrize("edit", EDITS)
def test_any_file_changed_after_signing_is_refused(signed: Path, tmp_path: Path, edit: str) -> None:
    names = every_file(signed)
    assert len(names) >= 10  # hints, checks, card and reference are among them
    for position, name in enumerate(names):
        copy = Path(shutil.copytree(signed, tmp_path / str(position)))
        EDITS[edit](copy / name)
        with pytest.raises(PlanError, match=re.escape(Path(name).name)):
            load(copy, part_of(name))


@pytest.mark.parametrize("name", ["server/extra", "node/node_9.onnx", "reference/extra", "node/.hidden"])
def test_file_added_after_signing_is_refused(bundle: Path, name: str) -> None:
    (bundle / name).write_bytes(b"")
    with pytest.raises(PlanError, match="was added after the folder was signed"):
        load(bundle, part_of(name))


def test_card_added_after_signing_is_refused(dense_bundle: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(dense_bundle, tmp_path / "bundle"))
    sign_bundle(folder, KEY)
    (folder / "card.json").write_text('{"epsilon": 0.1}')
    with pytest.raises(PlanError, match="card"):
        load(folder, Part.BUNDLE)


def test_signature_of_another_folder_does_not_pass(bundle: Path) -> None:
    """Even where the files are the same."""
    shutil.rmtree(bundle / "node")
    shutil.copytree(bundle / "server", bundle / "node")
    with pytest.raises(PlanError, match="was signed as server: expected node"):
        load(bundle, Part.NODE)


def test_whole_bundle_is_refused_where_one_folder_is_somebody_elses(bundle: Path) -> None:
    sign_part(bundle, Part.NODE, OTHER)
    load(bundle, Part.SERVER)
    with pytest.raises(PlanError, match="not trusted"):
        load(bundle, Part.BUNDLE)
    with pytest.raises(PlanError, match="not signed by one key"):
        find_signer(bundle)


@PARTS
def test_every_flipped_bit_of_a_signature_file_is_refused(bundle: Path, part: Part) -> None:
    path = part.folder(bundle) / SIGNATURE_FILE
    content = path.read_bytes()
    for position in range(0, len(content), 5):
        changed = bytearray(content)
        changed[position] ^= 1 << (position % 8)
        path.write_bytes(changed)
        with pytest.raises(PlanError):
            load(bundle, part)
    path.write_bytes(content)
    load(bundle, part)


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"heinfer-signature-1 node\n", b"\xff" * 100, b"heinfer-signature-1 node\n" * 10**5]
)
def test_file_that_is_no_signature_is_refused(bundle: Path, content: bytes) -> None:
    (bundle / "node" / SIGNATURE_FILE).write_bytes(content)
    with pytest.raises(PlanError, match="not a signature of this version"):
        load(bundle, Part.NODE)


def test_signature_file_is_read_no_further_than_its_limit(bundle: Path) -> None:
    with (bundle / "node" / SIGNATURE_FILE).open("ab") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(PlanError, match="not a signature of this version"):
        load(bundle, Part.NODE)


@pytest.mark.parametrize("kind", ["a folder", "a link"])
def test_signature_that_is_no_plain_file_is_refused(bundle: Path, kind: str) -> None:
    EDITS[kind](bundle / "node" / SIGNATURE_FILE)
    with pytest.raises(PlanError, match=r"bundle\.sig does not belong in a bundle"):
        load(bundle, Part.NODE)


def test_key_swapped_into_a_signature_is_refused(bundle: Path) -> None:
    edit_signature(bundle, Part.NODE, RAW.hex().encode(), OTHER_RAW.hex().encode())
    with pytest.raises(PlanError, match="was not made by the key"):
        load(bundle, Part.NODE, frozenset({OTHER_RAW}))


def test_key_that_is_no_point_of_the_curve_is_refused(bundle: Path) -> None:
    bad = b"\xff" * 32
    edit_signature(bundle, Part.NODE, RAW.hex().encode(), bad.hex().encode())
    with pytest.raises(PlanError, match="was not made by the key"):
        load(bundle, Part.NODE, frozenset({bad}))


def test_sign_bundle_refuses_a_bundle_that_was_edited(bundle: Path) -> None:
    path = bundle / "server" / "weights.safetensors"
    path.write_bytes(path.read_bytes() + b"x")
    before = (bundle / SIGNATURE_FILE).read_bytes()
    with pytest.raises(PlanError, match="not what was partitioned"):
        sign_bundle(bundle, OTHER)
    assert (bundle / SIGNATURE_FILE).read_bytes() == before


def test_rotation_of_a_signed_bundle_needs_a_key_and_signs_what_is_renewed(bundle: Path) -> None:
    names = ("hints.safetensors", "checks.safetensors", SIGNATURE_FILE)
    before = [(bundle / "node" / name).read_bytes() for name in names]
    with pytest.raises(PlanError, match="give --key"):
        rotate(bundle)
    assert [(bundle / "node" / name).read_bytes() for name in names] == before
    rotate(bundle, key=KEY)
    after = [(bundle / "node" / name).read_bytes() for name in names]
    assert all(one != two for one, two in zip(before, after, strict=True))
    load(bundle, Part.BUNDLE)
    load(bundle, Part.NODE)
    # Old hints, which an older signature covers, do not pass for new ones.
    (bundle / "node" / names[0]).write_bytes(before[0])
    with pytest.raises(PlanError, match=r"hints\.safetensors is not the file that was signed"):
        load(bundle, Part.NODE)


def test_rotation_by_another_key_needs_the_signer_to_be_trusted(bundle: Path) -> None:
    with pytest.raises(PlanError, match="not trusted"):
        rotate(bundle, key=OTHER)
    rotate(bundle, key=OTHER, trusted=TRUSTED)
    load(bundle, Part.SERVER)
    load(bundle, Part.NODE, frozenset({OTHER_RAW}))


def test_rotation_does_not_sign_what_was_changed_or_unsigned(bundle: Path, dense_bundle: Path) -> None:
    path = bundle / "node" / "hints.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(PlanError, match="not the file that was signed"):
        rotate(bundle, key=KEY)
    with pytest.raises(PlanError, match="is not signed"):
        rotate(dense_bundle, key=KEY)


def test_new_keys_sign_and_are_trusted_and_the_private_one_is_its_owners(signed: Path, tmp_path: Path) -> None:
    made = make_keys(tmp_path / "keys")
    assert stat.S_IMODE(made.private.stat().st_mode) == 0o600
    assert read_trusted_keys([made.public]) == {made.key}
    assert read_signing_key(made.private).public_key().public_bytes_raw() == made.key
    with pytest.raises(InputError, match="exists"):
        make_keys(tmp_path / "keys")
    made.public.unlink()
    with pytest.raises(InputError, match=r"signing\.pem exists"):
        make_keys(tmp_path / "keys")
    assert not made.public.exists()


def pem(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_keys_that_cant_be_used_are_refused_with_the_reason(tmp_path: Path) -> None:
    plain = KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    locked = KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    other = X25519PrivateKey.generate()
    other_plain = other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    other_public = other.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    assert read_signing_key(pem(tmp_path / "a", plain)).public_key() == KEY.public_key()
    for content, mode, reason in [
        (plain, 0o640, "chmod 600"),
        (plain, 0o604, "chmod 600"),
        (locked, 0o600, "is encrypted"),
        (other_plain, 0o600, "another kind"),
        (public, 0o600, "no private key"),
        (b"", 0o600, "no private key"),
    ]:
        with pytest.raises(InputError, match=reason):
            read_signing_key(pem(tmp_path / "b", content, mode))
    assert read_trusted_keys([pem(tmp_path / "c", public)]) == {RAW}
    for content, reason in [(other_public, "another kind"), (plain, "no public key"), (b"", "no public key")]:
        with pytest.raises(InputError, match=reason):
            read_trusted_keys([pem(tmp_path / "c", content), tmp_path / "c"])
    for read in (read_signing_key, lambda path: read_trusted_keys([path])):
        for path in (tmp_path / "absent", tmp_path):
            with pytest.raises(InputError, match="can't read"):
                read(path)
    assert read_trusted_keys([]) is None


def test_fingerprint_is_half_of_the_keys_digest() -> None:
    assert fingerprint(RAW).replace("-", "") == hashlib.sha256(RAW).hexdigest()[:32]
    assert fingerprint(RAW) != fingerprint(OTHER_RAW)


def run(*arguments: object) -> str:
    """Run a command in this process; return what it printed. What it refuses is raised."""
    done = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_commands_sign_show_and_refuse(dense_bundle: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(dense_bundle, tmp_path / "bundle"))
    for name in ("keys", "others"):
        run("sign", "--new-key", tmp_path / name)
    key, public = tmp_path / "keys" / "signing.pem", tmp_path / "keys" / "signing.pub"
    wrong = ("--trusted-key", tmp_path / "others" / "signing.pub")
    assert "Unsigned" in run("inspect", folder)
    with pytest.raises(PlanError, match="is not signed"):
        run("inspect", folder, "--trusted-key", public)
    (raw,) = read_trusted_keys([public]) or ()
    assert fingerprint(raw) in run("sign", folder, "--key", key)
    assert f"Signed by {fingerprint(raw)}" in run("inspect", folder, *wrong, "--trusted-key", public)
    for arguments in (
        ("inspect", folder),
        ("estimate", folder),
        ("serve", folder / "server"),
        ("node", folder / "node", "--server", "127.0.0.1:1"),
        ("evaluate", folder, "--data", tmp_path / "absent.npz"),
        ("infer", "--bundle", folder, dense_bundle / "plan.json"),
        ("partition", "--rotate", folder, "--key", tmp_path / "others" / "signing.pem"),
    ):
        with pytest.raises(PlanError, match="not trusted"):
            run(*arguments, *wrong)
    with pytest.raises(InputError, match="chmod 600"):
        run("sign", folder, "--key", public)
    with pytest.raises(PlanError, match="give --key"):
        run("partition", "--rotate", folder)
    run("partition", "--rotate", folder, "--key", key)
    load_node(folder / "node", frozenset({raw}))


@pytest.mark.parametrize(
    "arguments",
    [
        ("sign",),
        ("sign", "bundle"),
        ("sign", "--key", "signing.pem"),
        ("sign", "bundle", "--new-key", "keys"),
        ("partition", "model.onnx", "-o", "bundle", "--key", "signing.pem"),
        ("infer", "--node", "127.0.0.1:1", "--trusted-key", "signing.pub", "query.npy"),
    ],
)
def test_commands_with_options_that_dont_go_together_are_wrong_usage(arguments: tuple[str, ...]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_query_of_a_signed_bundle_is_answered_only_with_its_signer_trusted(signed: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "query.npy", np.ones((1, 3), np.float32))
    public = pem(
        tmp_path / "a.pub", KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo), 0o644
    )
    other = pem(
        tmp_path / "b.pub", OTHER.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo), 0o644
    )
    said = run("infer", "--bundle", signed, tmp_path / "query.npy", "--trusted-key", public)
    assert "1 sample(s)" in said
    with pytest.raises(PlanError, match="not trusted"):
        run("infer", "--bundle", signed, tmp_path / "query.npy", "--trusted-key", other)


PRIVATE_PEM = KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
PUBLIC_PEM = KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def damaged_pem(content: bytes) -> st.SearchStrategy[bytes]:
    """Return PEM whose text, or whose DER under whole text, was edited."""
    begin, *lines, end = content.decode().split("\n")[:-1]
    der = base64.b64decode("".join(lines))
    return mutated(content) | mutated(der).map(
        lambda body: f"{begin}\n{base64.b64encode(body).decode()}\n{end}\n".encode()
    )


@given(damaged_pem(PUBLIC_PEM), damaged_pem(PRIVATE_PEM))
def test_damaged_key_files_are_keys_or_input_errors(
    tmp_path_factory: pytest.TempPathFactory, public: bytes, private: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.pem"
    for content, read in ((public, lambda p: read_trusted_keys([p])), (private, read_signing_key)):
        with suppress(InputError):
            assert read(pem(path, content)) is not None
