"""A private certificate authority for trials, and the certificates that it signs.

    authority = open_authority(Path("certs/ca/node-server"), "heinfer nodes and servers")
    write_identity(Path("certs/servers/gpu"), authority, "gpu", ("gpu.example.org",), Use.ACCEPT, days=90)

writes ca.pem, cert.pem and key.pem into certs/servers/gpu, as `heinfer.wire.security.Tls` reads them. Keys are on the
curve P-256, for signatures only. An authority's key is needed for new certificates and for nothing else.
"""

from __future__ import annotations

import enum
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from heinfer.wire.address import TransportError
from heinfer.wire.security import CA_FILE, CERTIFICATE_FILE, KEY_FILE, check_private

#: How long an authority of a trial lasts: what it signs does not outlive it.
AUTHORITY_DAYS = 3650
#: How far the clocks of two machines may be apart when a certificate is new.
_SKEW = timedelta(minutes=5)


class Use(enum.Enum):
    """What a certificate is for: the side that accepts connections, or the one that makes them."""

    ACCEPT = ExtendedKeyUsageOID.SERVER_AUTH
    CONNECT = ExtendedKeyUsageOID.CLIENT_AUTH


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs certificates."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def open_authority(folder: Path, name: str) -> Authority:
    """Read an authority from its folder, or make one there.

    Raises:
        TransportError: the folder holds half of one, or what is none; or others may read its key.
    """
    certificate, key = folder / CERTIFICATE_FILE, folder / KEY_FILE
    if not certificate.exists() and not key.exists():
        made = _make_authority(name)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_pair(folder, made.certificate, made.key)
        return made
    check_private(key, "the authority's key; without it no certificate can be added")
    try:
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
        private = serialization.load_pem_private_key(key.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise TransportError(f"{folder} holds no authority that can be read: {error}") from None
    if not isinstance(private, ec.EllipticCurvePrivateKey) or private.public_key() != found.public_key():
        raise TransportError(
            f"{key} is not the key of {certificate}: bring the right one back, or begin anew elsewhere"
        )
    return Authority(found, private)


def write_identity(
    folder: Path, authority: Authority, name: str, hosts: Sequence[str], use: Use, days: int
) -> datetime:
    """Write a new key, its certificate and the authority's certificate; what was there is replaced.

    Args:
        folder: for ca.pem, cert.pem, key.pem.
        authority: signs.
        name: the subject, for people.
        hosts: names and IP addresses at which peers connect to it; none for a side that only connects.
        use: what it is for.
        days: how long it is valid, from now.

    Returns:
        When it expires.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    expires = min(now + timedelta(days=days), authority.certificate.not_valid_after_utc)
    builder = _builder(name, authority.certificate.subject, key, now - _SKEW, expires)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_key_usage(digital_signature=True), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([use.value]), critical=False)
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = builder.add_extension(signer, critical=False)
    if hosts:
        names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write_pair(folder, builder.sign(authority.key, hashes.SHA256()), key)
    _write(folder / CA_FILE, _pem(authority.certificate), 0o644)
    return expires


def _make_authority(name: str) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = _builder(name, subject, key, now - _SKEW, now + timedelta(days=AUTHORITY_DAYS))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(key_cert_sign=True), critical=True)
    return Authority(builder.sign(key, hashes.SHA256()), key)


def _builder(
    name: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, begins: datetime, ends: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(digital_signature: bool = False, key_cert_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=key_cert_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_pair(folder: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_private(folder / KEY_FILE, private)
    _write(folder / CERTIFICATE_FILE, _pem(certificate), 0o644)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def write_private(path: Path, content: bytes) -> None:
    """Write a secret's file, for its owner's eyes only from its first byte on."""
    _write(path, content, 0o600)


def _write(path: Path, content: bytes, mode: int) -> None:
    work = path.with_name(f".{path.name}.{os.getpid()}")
    work.unlink(missing_ok=True)
    try:
        descriptor = os.open(work, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)  # whatever the umask
            file.write(content)
        os.replace(work, path)
    finally:
        work.unlink(missing_ok=True)
