"""What the server's process may load."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from heinfer.processes import child_environment
from tests.parties import REPOSITORY

FORBIDDEN = ("tenseal", "trusted_node", "partitioner", "heinfer.training", "heinfer.client", "onnxruntime", "torch")


def loaded_by(statement: str) -> set[str]:
    """Return the modules that a fresh interpreter has after a statement."""
    program = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, cwd=REPOSITORY, env=child_environment()
    )
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("module", ["heinfer.server", "heinfer.server.service", "heinfer.server.evaluation"])
def test_import_of_the_server_loads_neither_keys_nor_models(module: str) -> None:
    found = loaded_by(f"import {module}")
    assert module in found
    assert not {name for name in found if name.startswith(tuple(f"{f}." for f in FORBIDDEN)) or name in FORBIDDEN}


def test_import_of_the_adapter_does_load_tenseal() -> None:
    assert "tenseal.sealapi" in loaded_by("import trusted_node.seal")  # the check above can fail
