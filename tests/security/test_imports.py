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


#: What has to do with secrets in SEAL.
SECRETS = {"KeyGenerator", "SecretKey", "PublicKey", "Decryptor", "Encryptor"}
#: Ways to a name that this search could not see through.
DETOURS = {
    "getattr",
    "vars",
    "globals",
    "locals",
    "attrgetter",
    "import_module",
    "__import__",
    "__dict__",
    "eval",
    "exec",
}
#: Where a name is looked up by value: in what a thread keeps, and a field of the counts of connections.
KNOWN_LOOKUPS = {"getattr(_local, name, None)", "getattr(read(), reason)"}
#: What may be imported by these modules alone, of all packages.
FENCED = {
    "tenseal": {"heinfer.server.polynomial.arithmetic", "trusted_node.deep", "trusted_node.seal"},
    "heinfer.ring.seal_chain": {
        "heinfer.server.polynomial.arithmetic",
        "heinfer.server.polynomial.running",
        "heinfer.server.polynomial.worker",
        "trusted_node.deep",
    },
    "heinfer.ring.saved_form": {"heinfer.ring.seal_chain", "trusted_node.deep", "trusted_node.seal"},
}
#: All that the server uses of SEAL's binding.
USED_BY_THE_SERVER = {"Ciphertext", "Plaintext", "Evaluator", "CKKSEncoder"}


def name_of(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, module: str) -> set[str]:
    """Return every module that a module imports, and what of it, as dotted names."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                found |= {alias.name for alias in node.names}
            case ast.ImportFrom():
                base = module.split(".")[: -node.level] if node.level else []
                source = ".".join([*base, *([node.module] if node.module else [])])
                found |= {source, *(f"{source}.{alias.name}" for alias in node.names)}
    return found


def crosses(name: str, fence: str) -> bool:
    return name == fence or name.startswith(f"{fence}.")


def fenced(tree: ast.AST, module: str) -> set[str]:
    """Return what a module imports, though others alone may."""
    names = imported(tree, module)
    return {f for f, allowed in FENCED.items() if module not in allowed and any(crosses(name, f) for name in names)}


def reaches(tree: ast.AST) -> set[str]:
    """Return what in a module names a secret of SEAL, or may reach one by a name that can't be read here."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(), *_]):
                pass  # the name can be read, as a constant below
            case ast.Call() if ast.unparse(node) in KNOWN_LOOKUPS:
                pass
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in DETOURS:
                found.add(name)
            case ast.Attribute(attr="__dict__"):
                found.add("__dict__")
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) if name in SECRETS:
                found.add(name)
            case ast.Constant(value=str(text)) if text in SECRETS:
                found.add(text)
            case ast.Import() | ast.ImportFrom():
                if {name.partition(".")[0] for name in imported(node, "")} & {"importlib", "pkgutil", "runpy"}:
                    found.add("importlib")
    return found


@pytest.mark.parametrize(
    "text",
    [
        "seal.KeyGenerator(context)", "from tenseal.sealapi import SecretKey", "from x import Decryptor as D",
        "getattr(seal, 'Encryptor')", "getattr(seal, 'Key' + 'Generator')", "getattr(seal, name)",
        "vars(seal)[name]", "seal.__dict__[name]", "__import__('tenseal')", "import importlib",
        "from importlib import import_module", "operator.attrgetter(name)(seal)", "name = 'SecretKey'",
    ],
)  # fmt: skip
def test_a_planted_way_to_a_secret_is_found(text: str) -> None:
    assert reaches(ast.parse(f"def planted():\n    {text}"))
    assert not reaches(ast.parse("getattr(x, 'size'); seal.Evaluator(context); from numpy import array"))


@pytest.mark.parametrize(
    ("module", "text", "found"),
    [
        ("heinfer.server.service", "import tenseal.sealapi as s", "tenseal"),
        ("heinfer.server.polynomial.running", "from tenseal import sealapi", "tenseal"),
        ("heinfer.server.service", "from heinfer.ring import seal_chain", "heinfer.ring.seal_chain"),
        ("heinfer.ring.product", "from .seal_chain import SealChain", "heinfer.ring.seal_chain"),
        ("heinfer.client.api", "from heinfer.ring.saved_form import MemoryFile", "heinfer.ring.saved_form"),
        ("heinfer.ring", "def f():\n    import heinfer.ring.saved_form", "heinfer.ring.saved_form"),
    ],
)
def test_a_planted_import_is_found(module: str, text: str, found: str) -> None:
    assert fenced(ast.parse(text), module) == {found}
    assert not fenced(ast.parse("from heinfer.ring import pack; import tensealike"), module)


def test_seal_and_its_saved_form_are_imported_by_those_that_may() -> None:
    found = {name_of(path): imported(ast.parse(path.read_text()), name_of(path)) for path in sources()}
    for fence, allowed in FENCED.items():  # who may and does not, should not be named
        assert {m for m, names in found.items() if any(crosses(name, fence) for name in names)} == allowed


def test_server_and_ring_neither_name_nor_reach_a_secret() -> None:
    found = {}
    for path in sources():
        if name_of(path).startswith(("heinfer.server", "heinfer.ring")) and (
            reached := reaches(ast.parse(path.read_text()))
        ):
            found[name_of(path)] = reached
    assert found == {}


def test_the_server_uses_nothing_of_seal_but_what_works_on_ciphertexts() -> None:
    tree = ast.parse((REPOSITORY / "heinfer/server/polynomial/arithmetic.py").read_text())
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "sealapi"]
    attributes = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.value in uses}
    assert attributes == USED_BY_THE_SERVER
    handed_on = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and any(a in uses for a in n.args)]
    assert [ast.unparse(call.func) for call in handed_on] == ["SealChain"]
    of_attributes = sum(isinstance(n, ast.Attribute) and n.value in uses for n in ast.walk(tree))
    assert len(uses) == of_attributes + 1  # and nothing else is done with it


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
