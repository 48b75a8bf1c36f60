"""host:port."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heinfer.errors import InputError
from heinfer.wire import Address, parse_address

GOOD = {
    "localhost:50051": (Address("localhost", 50051), True),
    "LocalHost:1": (Address("LocalHost", 1), True),
    "127.0.0.1:0": (Address("127.0.0.1", 0), True),
    "127.9.9.9:1": (Address("127.9.9.9", 1), True),
    " [::1]:65535\n": (Address("::1", 65535), True),
    "[::ffff:127.0.0.1]:1": (Address("::ffff:127.0.0.1", 1), True),
    "0.0.0.0:1": (Address("0.0.0.0", 1), False),
    "[::]:1": (Address("::", 1), False),
    "[fe80::1%eth0]:1": (Address("fe80::1%eth0", 1), False),
    "192.0.2.1:80": (Address("192.0.2.1", 80), False),
    "gpu-box_1.example.org:443": (Address("gpu-box_1.example.org", 443), False),
    "localhost.example.org:1": (Address("localhost.example.org", 1), False),
    "127.0.0.1.nip.io:1": (Address("127.0.0.1.nip.io", 1), False),
}
BAD = [
    "", ":", "host", "host:", ":1", "host:port", "host:-1", "host:+1", "host:65536", "host:1 2", "host:\u0661",
    "::1:50051", "[::1]", "[::1", "[host]:1", "[127.0.0.1]:1", "[::g]:1", "127.0.0.1.5:1", "127.1:1", "0x7f.1:1",
    "1234:1", "a..b:1", "-a:1", "a-:1", "a b:1", "unix:/tmp/x:1", "dns:///host:1", "host/path:1", "u@host:1",
    f"{'a' * 64}:1", "[::1%a/b]:1", "a\x00b:1",
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), GOOD.items())
def test_parse(text, expected):
    address, is_loopback = expected
    assert parse_address(text) == address
    assert address.is_loopback is is_loopback
    assert parse_address(str(address)) == address


@pytest.mark.parametrize("text", BAD)
def test_refuse(text):
    with pytest.raises(InputError):
        parse_address(text)


@given(st.text("[]:.%0123456789abcdef-lost", max_size=20))
def test_any_text_parses_or_is_an_input_error(text):
    try:
        address = parse_address(text)
    except InputError:
        return
    assert parse_address(str(address)) == address


def test_localhost_is_one_address_to_sockets():
    assert Address("localhost", 5).endpoint == ("127.0.0.1", 5)
    assert Address("::1", 5).endpoint == ("::1", 5)
