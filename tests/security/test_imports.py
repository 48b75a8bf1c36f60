"""What the server's process may load."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

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


PACKAGES = ("heinfer", "partitioner", "trusted_node")
#: What runs code that it finds in the data it reads.
UNPICKLERS = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "jsonpickle",
    "marshal",
    "shelve",
    "yaml",
}
RUNNERS = {"eval", "exec", "compile", "__import__"}


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py"))


def unsafe(tree: ast.Module) -> list[str]:
    """Return what in a module may run code that comes with data."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                names = {alias.name.partition(".")[0] for alias in node.names}
                found += sorted(names & UNPICKLERS)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in UNPICKLERS:
                found.append(module)
            case ast.Call(func=ast.Name(id=name)) if name in RUNNERS:
                found.append(name)
            case ast.Call(func=ast.Attribute(attr="load", value=ast.Name(id=("np" | "numpy") as name)), keywords=given):
                if not any(k.arg == "allow_pickle" and _is(k.value, False) for k in given):
                    found.append(f"{name}.load without allow_pickle=False")
            case ast.Call(func=ast.Attribute(attr="load", value=ast.Name(id="torch")), keywords=given):
                if not any(k.arg == "weights_only" and _is(k.value, True) for k in given):
                    found.append("torch.load without weights_only=True")
            case ast.keyword(arg="allow_pickle", value=value) if not _is(value, False):
                found.append("allow_pickle")
    return found


def _is(node: ast.expr, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "from pickle import loads", "import os, joblib.numpy_pickle", "np.load(path)",
        "numpy.load(path, allow_pickle=True)", "np.load(path, allow_pickle=flag)", "torch.load(path)", "eval(text)",
        "read(allow_pickle=True)",
    ],
)  # fmt: skip
def test_the_search_below_finds_what_it_looks_for(text: str) -> None:
    assert unsafe(ast.parse(text))
    assert not unsafe(
        ast.parse("np.load(path, allow_pickle=False); torch.load(path, weights_only=True); re.compile('x')")
    )


def test_no_module_reads_files_in_a_way_that_may_run_code() -> None:
    files = sources()
    assert len(files) > 100
    found = {str(path.relative_to(REPOSITORY)): unsafe(ast.parse(path.read_text())) for path in files}
    # The generated stubs of protobuf import nothing of the kind either.
    assert {name: reasons for name, reasons in found.items() if reasons} == {}


LOADING = """
import collections, pickle, sys
from pathlib import Path
from heinfer.plan import load_node, load_reference, load_server, read_bundle_plan
from heinfer.plan.execution import PlanRunner
from heinfer.plan.signing import find_signer

found = []

def note(event, arguments):
    if event == "pickle.find_class":
        frame, callers = sys._getframe(), []
        while frame is not None:
            callers.append(frame.f_code.co_filename)
            frame = frame.f_back
        if not any(name.endswith("numba/core/caching.py") for name in callers):  # its own compiled kernels
            found.append(arguments)

sys.addaudithook(note)
folder = Path({folder!r})
node = load_node(folder / "node")
load_server(folder / "server")
load_reference(folder, read_bundle_plan(folder))
PlanRunner(node.plan, node.submodels)
find_signer(folder)
assert found == [], found
pickle.loads(pickle.dumps(collections.OrderedDict()))
assert found != []
"""


def test_loading_a_bundle_unpickles_nothing(dense_bundle: Path) -> None:
    """Python says so itself, by an audit event; and says it when something is unpickled."""
    assert "heinfer.plan" in loaded_by(LOADING.format(folder=str(dense_bundle)))
