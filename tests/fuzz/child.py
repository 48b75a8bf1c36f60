"""A process that takes examples one by one: for code below Python, where a crash ends the process.

The parent sends an example, the child calls its target with a file of it, and answers with one line of JSON. It may not
take more than a bounded amount of memory and processor time for one; where it dies the parent says of what, and the
next example gets a new child.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import TracebackType

from heinfer.processes import child_environment
from tests.fuzz.campaign import EXAMPLE_S, address_space

#: onnx and onnxruntime take space by the gigabyte that they don't use.
CHILD_BYTES = 3 * 2**30
#: Where nothing uses the processor and nothing comes back.
SILENCE_S = 120.0
_LENGTH = struct.Struct("<I")


class Child:
    """Runs a target in a process of its own, a new one after a crash; a context manager.

    Args:
        target: "module:function", called with the path of a file; what it may raise is the module's `EXPECTED`.
        environment: variables for it.
    """

    def __init__(self, target: str, environment: Mapping[str, str] | None = None) -> None:
        self._target = target
        self._environment = {**child_environment(), **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this object

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()
        self._errors.close()

    def check(self, example: bytes) -> str:
        """Run one example; return "accepted" or the name of the error that refused it.

        Raises:
            AssertionError: it raised something else, crashed, or took too long or too much.
        """
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(_LENGTH.pack(len(example)) + example)
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], SILENCE_S)
        answer = process.stdout.readline() if ready else b""
        if not answer:
            if not ready:
                process.kill()
            code = process.wait()
            self._end()
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise AssertionError(f"the process died ({name if ready else 'it hung'}): {self._last_words()}")
        found = json.loads(answer)
        assert found["fine"], found["outcome"]
        return str(found["outcome"])

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.child", self._target],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            env=self._environment, cwd=Path(__file__).resolve().parents[2],
        )  # fmt: skip
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
        process.wait()

    def _last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-2000:].decode(errors="replace")


def main() -> None:
    """Answer examples from standard input until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    module, _, name = sys.argv[1].partition(":")
    home = import_module(module)
    target, expected = getattr(home, name), home.EXPECTED
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "example"
        resource.setrlimit(resource.RLIMIT_AS, (address_space() + CHILD_BYTES, resource.RLIM_INFINITY))
        while header := sys.stdin.buffer.read(_LENGTH.size):
            path.write_bytes(sys.stdin.buffer.read(_LENGTH.unpack(header)[0]))
            _bound()
            answers.write(json.dumps(_run(target, path, expected)).encode() + b"\n")
            answers.flush()


def _bound() -> None:
    """Let the next example take `EXAMPLE_S` of processor time; then the system ends this process by SIGXCPU."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(usage.ru_utime + usage.ru_stime + EXAMPLE_S) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def _run(target: Callable[[Path], object], path: Path, expected: tuple[type[Exception], ...]) -> dict[str, object]:
    try:
        target(path)
    except expected as error:
        return {"fine": True, "outcome": type(error).__name__}
    except BaseException:
        return {"fine": False, "outcome": traceback.format_exc()}
    return {"fine": True, "outcome": "accepted"}


if __name__ == "__main__":
    main()
