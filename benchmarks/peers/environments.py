"""One virtual environment a peer, from pinned requirements, so that no peer's packages meet heinfer's or each other's.

    python benchmarks/peers/environments.py [--folder .bench] [--torch cpu] [--only tenseal concrete]

    built     tenseal     96 MB in 14 s
    was there concrete  1200 MB
    left out  orion: pip failed (rc 1): No matching distribution found for ...; delete .bench/orion and try again

requirements/NAME.txt names every package with its version, also those that others pull in. They are installed without
dependencies, since some peers forbid versions that they run with (Concrete ML 1.9 asks for the torch of early 2024,
which has no wheel without CUDA outside PyTorch's own index). torch alone is installed with its dependencies, for they
differ between its builds: `--torch cpu` takes the one without CUDA from PyTorch's own index.

An environment is built once for each text of its requirements; an edit builds it anew. Where one cannot be built, the
rest goes on, the reason is said in one line, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PEERS = Path(__file__).resolve().parent
REQUIREMENTS = PEERS / "requirements"
DEFAULT_FOLDER = PEERS.parent.parent / ".bench"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

#: Written last: holds the digest of the requirements that the environment has.
MARKER = "requirements.sha256"


@dataclass(frozen=True, slots=True)
class Environment:
    """One peer's environment; `error` is empty where it can be used.

    Attributes:
        name: Of the requirements file, without its suffix.
        python: Its interpreter.
        built_s: Seconds that building took; None where it was there.
        size_bytes: On disk.
        error: One line with the remedy, or nothing.
    """

    name: str
    python: Path
    built_s: float | None = None
    size_bytes: int = 0
    error: str = ""


def names() -> list[str]:
    """Return the environments that have requirements."""
    return sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))


def is_built(name: str, folder: Path = DEFAULT_FOLDER) -> bool:
    """Say whether an environment is there, whole, with the requirements as they are now."""
    marker = folder / name / MARKER
    return marker.is_file() and marker.read_text() == _digest(name)


def build(name: str, folder: Path = DEFAULT_FOLDER, torch: str = "default") -> Environment:
    """Build an environment unless it is there.

    Args:
        name: One of `names()`.
        folder: Holds one folder for each environment.
        torch: "default" for the index that pip is set up with, "cpu" for PyTorch's own index beside it.
    """
    root = folder / name
    python = root / "bin/python"
    requirements = REQUIREMENTS / f"{name}.txt"
    if is_built(name, folder):
        return Environment(name, python, size_bytes=_size_bytes(root))
    started = time.perf_counter()
    shutil.rmtree(root, ignore_errors=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        venv.create(root, with_pip=True, symlinks=True)
        _install(python, requirements, torch)
    except (OSError, subprocess.CalledProcessError) as error:
        return Environment(name, python, error=f"{_reason(error)}; mend that, then run this again")
    (root / MARKER).write_text(_digest(name))
    return Environment(name, python, time.perf_counter() - started, _size_bytes(root))


def _digest(name: str) -> str:
    return hashlib.sha256((REQUIREMENTS / f"{name}.txt").read_bytes()).hexdigest()


def _install(python: Path, requirements: Path, torch: str) -> None:
    """Install torch with its dependencies, then all packages without."""
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    pins = [line for line in requirements.read_text().splitlines() if line.startswith("torch==")]
    if pins:
        index = ["--extra-index-url", TORCH_INDEX] if torch == "cpu" else []
        _run([*pip, *index, *pins])
    _run([*pip, "--no-deps", "--requirement", str(requirements)])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _reason(error: OSError | subprocess.CalledProcessError) -> str:
    """Return the last thing that pip or the operating system said, in one line."""
    if isinstance(error, OSError):
        return str(error)
    lines = [line for line in (error.stderr or "").splitlines() if line.startswith("ERROR")]
    said = lines[-1] if lines else "no message (on Debian and Ubuntu, is python3-venv installed?)"
    return f"pip failed (rc {error.returncode}): {said}"


def _size_bytes(root: Path) -> int:
    return sum(path.lstat().st_size for path in root.rglob("*"))


def _lines(environments: Iterator[Environment]) -> Iterator[tuple[Environment, str]]:
    for environment in environments:
        size = f"{environment.size_bytes / 1e6:5.0f} MB"
        if environment.error:
            yield environment, f"left out  {environment.name}: {environment.error}"
        elif environment.built_s is None:
            yield environment, f"was there {environment.name:10} {size}"
        else:
            yield environment, f"built     {environment.name:10} {size} in {environment.built_s:.0f} s"


def main() -> int:
    """Build what is asked for, and say what became of each."""
    parser = argparse.ArgumentParser(description="Build the environments of the peers")
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--torch", choices=("default", "cpu"), default="default", help="cpu: PyTorch without CUDA")
    parser.add_argument("--only", nargs="+", choices=names(), default=names())
    arguments = parser.parse_args()
    failed = 0
    for environment, line in _lines(build(name, arguments.folder, arguments.torch) for name in arguments.only):
        failed += bool(environment.error)
        print(line, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
