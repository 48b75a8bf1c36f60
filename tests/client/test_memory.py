"""What processes are said to have taken: each its own, roles with their workers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from heinfer.client.evaluation import own_peak_memory_bytes
from heinfer.client.local import peak_memory_bytes, read_memory

MIB = 2**20


def test_client_s_memory_is_without_its_children() -> None:
    program = "data = bytearray(b'x') * (100 * 2**20); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        own, with_child, of_child = (
            own_peak_memory_bytes(),
            peak_memory_bytes(os.getpid()),
            peak_memory_bytes(child.pid),
        )
        child.communicate("\n")
    assert own is not None
    assert with_child is not None
    assert of_child is not None
    assert of_child > 100 * MIB
    assert with_child - own >= of_child - 10 * MIB  # this process may grow in between


def test_memory_of_no_process_is_unknown() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pass
    assert peak_memory_bytes(child.pid) is None
    with pytest.raises(OSError, match=str(child.pid)):
        read_memory(child.pid, "VmHWM")
