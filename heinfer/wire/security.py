"""How connections are protected: TLS 1.3 with certificates on both sides, or plain text where that was allowed.

    Tls.from_folder("certs/servers/gpu.example.org")      # ca.pem, cert.pem, key.pem
    PlainText.ON_LOOPBACK                                 # what holds where nothing is said

Each kind of connection, node to server and client to node, has a certificate authority of its own, and whoever holds a
certificate of that authority may take part in that kind. So roles are not ours to check: OpenSSL compares the
authority, the dates, the purpose (serverAuth for the side that accepts, clientAuth for the one that connects) and, on
the side that connects, the name or address. A client's certificate is of the other authority: no server takes it.

Files are read once. What is wrong with our own is said when they are, before anything listens.
"""

from __future__ import annotations

import enum
import os
import ssl
import stat
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from heinfer.errors import RemoteProtocolError
from heinfer.wire.address import Address, TransportError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

CA_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.pem", "cert.pem", "key.pem"

#: OpenSSL's codes (include/openssl/x509_vfy.h.in) for what people meet; the rest keep OpenSSL's words.
_NOT_OURS = (2, 7, 18, 19, 20, 21, 30)
_OTHER_NAME = (62, 64)
_REASONS = {
    9: "is not valid yet: look at its dates and at the clocks of both machines",
    10: "has expired: renew it, or set this machine's clock",
    26: "is not for this side of a connection: serverAuth accepts connections, clientAuth makes them",
    **dict.fromkeys(_NOT_OURS, "is not signed by our CA"),
    **dict.fromkeys(_OTHER_NAME, "does not name this host: connect by a name that it has, or have one made with this"),
}
#: What OpenSSL calls a peer that speaks no TLS.
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "PACKET_LENGTH_TOO_LONG")
_OLD_TLS = ("UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION", "NO_PROTOCOLS_AVAILABLE")


class PlainText(enum.Enum):
    """Connections without TLS: between processes of one machine, or anywhere, for networks that encrypt themselves."""

    ON_LOOPBACK = "on loopback"
    ANYWHERE = "anywhere"


class HandshakeError(RemoteProtocolError):
    """A peer is not let in, or went away before that was known. The message is made of fixed words, fit for a log."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Who we are and whom we believe.

    Attributes:
        expires: when our certificate does.
        uses: what it is for, "serverAuth" and "clientAuth"; empty where it does not say, and so is for both.
        source: our certificate's file, for messages.
        files: of the authorities, our certificate and our key, for what brings a TLS of its own (gRPC).
    """

    expires: datetime
    uses: frozenset[str]
    source: Path
    files: tuple[Path, Path, Path]
    _accepting: ssl.SSLContext
    _connecting: ssl.SSLContext

    @classmethod
    def load(cls, ca: Path, certificate: Path, key: Path) -> Tls:
        """Read PEM files.

        Args:
            ca: certificates of the authorities that sign our peers'; one need not be at the top.
            certificate: ours, and those between it and its authority.
            key: ours, not encrypted, and for its owner's eyes only.

        Raises:
            TransportError: a file is missing or no such thing, the key may be read by others or is encrypted, the two
                don't belong together, or our certificate has expired.
        """
        check_private(key, "a private key")
        ours = _read_certificate(certificate)
        if not ours.not_valid_before_utc <= datetime.now(UTC) < ours.not_valid_after_utc:
            raise TransportError(
                f"{certificate} is valid from {ours.not_valid_before_utc:%Y-%m-%d} until "
                f"{ours.not_valid_after_utc:%Y-%m-%d %H:%M} UTC and not now: renew it, or set the clock"
            )
        contexts = (_context(protocol, ca, certificate, key) for protocol in _PROTOCOLS)
        return cls(ours.not_valid_after_utc, _uses(ours), certificate, (ca, certificate, key), *contexts)

    @classmethod
    def from_folder(cls, folder: Path | str) -> Tls:
        """Read ca.pem, cert.pem and key.pem of a folder. Raises as `load`."""
        folder = Path(folder)
        return cls.load(folder / CA_FILE, folder / CERTIFICATE_FILE, folder / KEY_FILE)

    @property
    def accepting(self) -> ssl.SSLContext:
        """The context of accepted connections, for a server that makes its own (HTTP)."""
        return self._accepting

    def accept(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> ssl.SSLObject:
        """Return the engine of an accepted connection."""
        return self._accepting.wrap_bio(incoming, outgoing, server_side=True)

    def connect(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, host: str) -> ssl.SSLObject:
        """Return the engine of a connection to `host`, whose certificate must name it."""
        name = host.partition("%")[0]  # an IPv6 zone is this machine's own business
        return self._connecting.wrap_bio(incoming, outgoing, server_hostname=name)

    def check_use(self, use: str) -> None:
        """Raise TransportError unless our certificate is for `use`, "serverAuth" or "clientAuth"."""
        if self.uses and use not in self.uses:
            does = {"serverAuth": "accepts", "clientAuth": "makes"}
            raise TransportError(
                f"{self.source} is for the side that {' or '.join(does.get(u, u) for u in sorted(self.uses))} "
                f"connections, and this side {does[use]} them ({use}): name the other folder"
            )


Security = Tls | PlainText
_PROTOCOLS = (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)


def check_listening(address: Address, security: Security) -> None:
    """Raise TransportError where this is no way to listen there."""
    _check(address, security, "serverAuth")


def check_connecting(address: Address, security: Security) -> None:
    """Raise TransportError where this is no way to connect there."""
    _check(address, security, "clientAuth")


def _check(address: Address, security: Security, use: str) -> None:
    if isinstance(security, Tls):
        security.check_use(use)
    elif security is PlainText.ON_LOOPBACK and not address.is_loopback:
        raise TransportError(
            f"plain text is refused for {address}, which is not a loopback address: give certificates for TLS "
            "(`heinfer certs` makes some), or use an SSH tunnel and a loopback address"
        )


def refusal(error: Exception) -> str:
    """Say in fixed words why a handshake failed. Nothing that the peer sent is quoted."""
    match error:
        case ssl.SSLCertVerificationError(verify_code=code, verify_message=message):
            return f"the peer's certificate {_REASONS.get(code, f'is refused: {message}')}"
        case ssl.SSLError(reason="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
            return "the peer shows no certificate"
        case ssl.SSLError(reason=reason) if reason in _NO_TLS:
            return "the peer does not speak TLS"
        case ssl.SSLError(reason=reason) if reason in _OLD_TLS:
            return "the peer does not speak TLS 1.3"
        case ssl.SSLError(reason=reason):
            return f"the TLS handshake failed ({reason})"
        case BlockingIOError():
            return "the peer did not complete the TLS handshake in time"
        case _:
            return "the peer went away during the TLS handshake"


def _context(protocol: int, ca: Path, certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED  # names are checked too, which PROTOCOL_TLS_CLIENT brings
    context.hostname_checks_common_name = False  # a subject is for people (RFC 9525, section 2)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # ca.pem may hold an intermediate authority without its root
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # sessions are kept open, not resumed
    try:
        context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as error:
        raise _unusable(ca, "certificates of an authority", error) from None
    try:
        context.load_cert_chain(certificate, key, password=lambda: _refuse_password(key))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TransportError(f"{key} is not the key of {certificate}: take both from the same folder") from None
        raise _unusable(key, "a private key", error) from None
    return context


def check_private(path: Path, what: str) -> None:
    """Raise TransportError unless a secret's file is there, and its owner's alone."""
    try:
        found = path.stat()
    except OSError as error:
        raise TransportError(f"{path}: {error.strerror}; expected {what}") from None
    mode = stat.S_IMODE(found.st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO) and not _is_credential(path, found):
        raise TransportError(f"{path} may be read by others (mode {mode:04o}): chmod 600 {path}")


def _is_credential(path: Path, found: os.stat_result) -> bool:
    """Whether systemd gives this file to our service alone (`LoadCredential=`; systemd.exec(5), "Credentials").

    Such a file is root's, and an access control list lets the service's user read it. In the mode the list's mask
    stands in the group's place (acl(5)): 0440, though no group may read.
    """
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    return (
        bool(folder)
        and path.absolute().parent == Path(str(folder)).absolute()
        and found.st_uid == 0
        and stat.S_IMODE(found.st_mode) == stat.S_IRUSR | stat.S_IRGRP
    )


def _refuse_password(key: Path) -> str:
    raise TransportError(
        f"{key} is encrypted, and nobody is there to type its password: write it unencrypted "
        f"(openssl pkey -in {key} -out plain.pem; chmod 600 plain.pem)"
    )


def _read_certificate(path: Path) -> Certificate:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _unusable(path, "a certificate", error) from None


def _uses(certificate: Certificate) -> frozenset[str]:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    names = {ExtendedKeyUsageOID.SERVER_AUTH: "serverAuth", ExtendedKeyUsageOID.CLIENT_AUTH: "clientAuth"}
    try:
        found = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return frozenset()
    return frozenset(names.get(oid, oid.dotted_string) for oid in found)


def _unusable(path: Path, expected: str, error: Exception) -> TransportError:
    missing = isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError)
    found = error.strerror if isinstance(error, OSError) and missing else "not that, or damaged"
    return TransportError(f"{path}: {found}; expected {expected} in PEM form")
