#!/usr/bin/env python3
"""Asks a heinfer process whether it is well, for health checks of containers, which have no curl; 0 yes, 1 no.

    heinfer-probe [URL]

Settings, all by environment, so that HEALTHCHECK and Kubernetes' exec probes need no arguments:

    HEINFER_PROBE_URL      what to ask, where no argument says so
    HEINFER_PROBE_TLS      folder of ca.pem, cert.pem and key.pem: a client's certificate, for https
    HEINFER_PROBE_TOKEN    file of a token, for addresses that want one (all but /v2/health/live)

Only the standard library: it starts in 50 ms. A status of 200 means well; the body is not looked at.
"""

import http.client
import os
import ssl
import sys
from pathlib import Path
from urllib.parse import urlsplit

TIMEOUT_S = 4.0


def connection(url: str, certificates: str | None) -> http.client.HTTPConnection:
    """Return a connection, not yet open."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme == "http":
        return http.client.HTTPConnection(host, parts.port, timeout=TIMEOUT_S)
    if parts.scheme != "https":
        raise ValueError(f"expected a URL of http or https, found {url!r}")
    if not certificates:
        raise ValueError("https needs HEINFER_PROBE_TLS: a folder of ca.pem, cert.pem and key.pem")
    folder = Path(certificates)
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # ca.pem may hold an intermediate authority alone
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return http.client.HTTPSConnection(host, parts.port, timeout=TIMEOUT_S, context=context)


def status_of(url: str, certificates: str | None, token: str | None) -> int:
    """Return the status of GET."""
    headers = {"Authorization": f"Bearer {Path(token).read_text().strip()}"} if token else {}
    asked = connection(url, certificates)
    try:
        asked.request("GET", urlsplit(url).path or "/", headers=headers)
        return asked.getresponse().status
    finally:
        asked.close()


def main(arguments: list[str]) -> int:
    """Ask, and say what is wrong."""
    setting = os.environ.get
    url = arguments[0] if arguments else setting("HEINFER_PROBE_URL", "")
    try:
        status = status_of(url, setting("HEINFER_PROBE_TLS"), setting("HEINFER_PROBE_TOKEN"))
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1
    if status != http.client.OK:
        print(f"{url}: status {status}, expected {http.client.OK:d}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
