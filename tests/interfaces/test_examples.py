"""examples/: what a linter, systemd and our own command line say of them, and that none of the hardening is missing."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import yaml

from heinfer.processes import SETTINGS, child_environment
from tests.identities import Identities
from tests.interfaces.command_lines import command_lines, parse
from tests.parties import COMMAND, REPOSITORY, start

EXAMPLES = REPOSITORY / "examples"
ROLES = ("server", "node")
DOCKERFILES = {role: (EXAMPLES / role / "Dockerfile").read_text() for role in ROLES}
COMPOSE: dict[str, Any] = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())
UNITS = {role: EXAMPLES / "systemd" / f"heinfer-{role}.service" for role in ROLES}
#: Set in every deployment, where no `child_environment` of ours sets it.
EXPECTED_SETTINGS = ("OMP_WAIT_POLICY", "OPENBLAS_NUM_THREADS", "NUMBA_CACHE_DIR")


# Images


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("hadolint")
    return subprocess.run([program, path], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("role", ROLES)
def test_linter_finds_nothing_in_the_dockerfile(role: str) -> None:
    done = hadolint(EXAMPLES / role / "Dockerfile")
    assert done.returncode == 0, done.stdout
    assert not done.stdout


def test_linter_finds_something_in_a_bad_dockerfile(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python\nRUN pip install heinfer\n")
    assert hadolint(bad).returncode != 0


def instructions(dockerfile: str, name: str) -> list[str]:
    """Arguments of an instruction, in order, over all stages."""
    joined = re.sub(r"\\\n\s*", " ", re.sub(r"(?m)^#.*\n", "", dockerfile))
    return [line.partition(" ")[2].strip() for line in joined.splitlines() if line.startswith(f"{name} ")]


@pytest.mark.parametrize("role", ROLES)
def test_image_runs_as_nobody_with_a_pinned_base_and_a_probe(role: str) -> None:
    text = DOCKERFILES[role]
    bases = {base.split()[0] for base in instructions(text, "FROM")}
    assert len(bases) == 1
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", bases.pop())
    assert instructions(text, "USER") == ["10001:10001"]
    assert instructions(text, "STOPSIGNAL") == ["SIGTERM"]
    assert json.loads(instructions(text, "HEALTHCHECK")[0].partition("CMD ")[2]) == ["heinfer-probe"]
    settings = dict(word.split("=", 1) for word in shlex.split(instructions(text, "ENV")[0]))
    assert set(EXPECTED_SETTINGS) <= set(settings)
    assert all(settings[name] == SETTINGS[name] for name in EXPECTED_SETTINGS if name in SETTINGS)
    assert "--constraint constraints.txt" in " ".join(instructions(text, "RUN"))


@pytest.mark.parametrize("role", ROLES)
def test_image_starts_its_role_with_options_that_exist(role: str) -> None:
    text = DOCKERFILES[role]
    assert json.loads(instructions(text, "ENTRYPOINT")[0]) == ["heinfer"]
    parse(json.loads(instructions(text, "CMD")[0]))


@pytest.mark.parametrize("role", ROLES)
def test_build_context_holds_what_is_copied_and_no_secrets(role: str) -> None:
    lines = (EXAMPLES / role / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    let_through = [rule[1:] for rule in rules if rule.startswith("!")]
    assert all((REPOSITORY / path).exists() for path in let_through)
    assert {"heinfer", "partitioner", "trusted_node", "pyproject.toml", "constraints.txt"} <= set(let_through)
    assert rules.index("**/*.pem") > max(rules.index(f"!{path}") for path in let_through), "rules that come later win"


# Compose


@pytest.mark.parametrize("role", ROLES)
def test_service_is_hardened(role: str) -> None:
    service = COMPOSE["services"][role]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["ulimits"]["core"] == 0
    assert service["user"] == "10001:10001"
    assert service["mem_limit"] == service["memswap_limit"], "the difference would be swap"
    assert all(mount["read_only"] for mount in service["volumes"])
    assert any(mount.startswith("/var/cache/heinfer:") and "mode=0700" in mount for mount in service["tmpfs"])
    assert not service.get("privileged")


@pytest.mark.parametrize("role", ROLES)
def test_service_starts_its_role_with_options_that_exist(role: str) -> None:
    command = COMPOSE["services"][role]["command"]
    assert ("serve" if role == "server" else "node") in command
    parse(command)


def test_server_has_no_way_to_clients_and_gets_nothing_of_the_node() -> None:
    server, node = (COMPOSE["services"][role] for role in ROLES)
    assert server["networks"] == ["node-server"]
    assert COMPOSE["networks"]["node-server"]["internal"] is True
    assert "ports" not in server
    assert not set(server["secrets"]) & set(node["secrets"])
    assert {mount["source"] for mount in server["volumes"]} == {"./bundle/server", "./certs/nodes/probe/to-server"}


@pytest.mark.parametrize("role", ROLES)
def test_secrets_that_are_named_are_given(role: str) -> None:
    service = COMPOSE["services"][role]
    named = {word.removeprefix("/run/secrets/") for word in service["command"] if word.startswith("/run/secrets/")}
    assert named == set(service["secrets"])
    assert named <= set(COMPOSE["secrets"])
    mounted = {mount["target"] for mount in service["volumes"]}
    paths = [word for word in service["command"] if word.startswith("/") and not word.startswith("/run/secrets/")]
    assert all(any(Path(path).is_relative_to(target) for target in mounted) for path in paths), paths


@pytest.mark.parametrize("role", ROLES)
def test_service_has_longer_to_stop_than_the_grace_that_running_answers_have(role: str) -> None:
    from heinfer.cli.roles import GRACE_S

    assert float(COMPOSE["services"][role]["stop_grace_period"].removesuffix("s")) > GRACE_S
    assert float(unit(role)["TimeoutStopSec"][0].removesuffix("s")) > GRACE_S


# Units


def unit(role: str) -> dict[str, list[str]]:
    """The section [Service]: every value of a name, in order."""
    text = re.sub(r"\\\n\s*", " ", UNITS[role].read_text())
    section = text.split("[Service]")[1].split("[Install]")[0]
    found: dict[str, list[str]] = {}
    for line in section.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


@pytest.mark.parametrize("role", ROLES)
def test_unit_is_hardened(role: str) -> None:
    found = unit(role)
    expected = {
        "LimitCORE": "0",
        "ProtectSystem": "strict",
        "ProtectHome": "yes",
        "PrivateTmp": "yes",
        "NoNewPrivileges": "yes",
        "CapabilityBoundingSet": "",
        "RestrictAddressFamilies": "AF_INET AF_INET6 AF_UNIX",
        "Restart": "on-failure",
        "UMask": "0077",
        "CacheDirectoryMode": "0700",
    }
    assert {name: found.get(name, [None])[-1] for name in expected} == expected
    assert found["SystemCallFilter"] == ["@system-service", "~@privileged @resources"]
    assert "MemoryDenyWriteExecute" not in found, "numba's kernels could not be loaded"
    settings = dict(word.split("=", 1) for word in found["Environment"][0].split())
    assert set(EXPECTED_SETTINGS) <= set(settings)
    assert all(settings[name] == SETTINGS[name] for name in EXPECTED_SETTINGS if name in SETTINGS)


@pytest.mark.parametrize("role", ROLES)
def test_unit_starts_its_role_with_options_and_credentials_that_exist(role: str) -> None:
    found = unit(role)
    words = shlex.split(found["ExecStart"][0])
    assert words[0].endswith("/heinfer")
    parse(words[1:])
    used = set(re.findall(r"\$\{CREDENTIALS_DIRECTORY\}/(\S+)", found["ExecStart"][0]))
    assert used == {value.partition(":")[0] for value in found["LoadCredential"]}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("role", ROLES)
def test_systemd_finds_nothing_in_the_unit(role: str, tmp_path: Path) -> None:
    path = tmp_path / UNITS[role].name
    path.write_text(UNITS[role].read_text().replace("/opt/heinfer/bin/heinfer", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", path], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not [line for line in done.stderr.splitlines() if path.name in line], done.stderr


# The probe


class Answers(BaseHTTPRequestHandler):
    """200 under /well, 503 elsewhere; notes what was shown."""

    shown: list[str | None]

    def do_GET(self) -> None:
        type(self).shown.append(self.headers["Authorization"])
        self.send_response(200 if self.path == "/well" else 503)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def listening(tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve `Answers`; yields host and port."""
    Answers.shown = []
    server = HTTPServer(("127.0.0.1", 0), Answers)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def probe(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEINFER_PROBE")}
    return subprocess.run(
        [sys.executable, EXAMPLES / "probe.py", *arguments],
        env={**kept, **settings}, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


def test_probe_tells_well_from_ill_and_shows_its_token(tmp_path: Path) -> None:
    token = tmp_path / "probe.token"
    token.write_text("secret\n")
    with listening() as address:
        assert probe(HEINFER_PROBE_URL=f"http://{address}/well").returncode == 0
        ill = probe(f"http://{address}/ill", HEINFER_PROBE_TOKEN=str(token))
        assert (ill.returncode, ill.stderr) == (1, f"http://{address}/ill: status 503, expected 200\n")
        assert Answers.shown == [None, "Bearer secret"]
    gone = probe(f"http://{address}/well")
    assert gone.returncode == 1
    assert "refused" in gone.stderr
    assert "expected a URL" in probe("ftp://127.0.0.1/well").stderr


def accepting(folder: Path) -> ssl.SSLContext:
    """TLS of the side that accepts, which wants a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(folder / "ca.pem")
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


def test_probe_shows_a_certificate_and_wants_one(tmp_path: Path) -> None:
    made = Identities(tmp_path)
    client = str(made["client"])
    with listening(accepting(made["node to clients"])) as address:
        assert probe(f"https://{address}/well", HEINFER_PROBE_TLS=client).returncode == 0
        assert "needs HEINFER_PROBE_TLS" in probe(f"https://{address}/well").stderr
        foreign = probe(f"https://{address}/well", HEINFER_PROBE_TLS=str(made["foreign client"]))
        assert foreign.returncode == 1
        assert "CERTIFICATE_VERIFY_FAILED" in foreign.stderr


# Prometheus


def exported() -> dict[str, set[str]]:
    """Series that node and server export, as queries name them, and their labels where there are some already."""
    from heinfer.server.metrics import ServerMetrics
    from heinfer.wire.budget import MemoryBudget
    from heinfer.wire.listener import ConnectionCounts
    from tests.interfaces.fakes import fake_models
    from trusted_node.serving.metrics import NodeMetrics

    node, server = NodeMetrics(), ServerMetrics()
    node.watch(fake_models())
    expiring: Any = SimpleNamespace(expires=datetime.now(UTC))
    node.watch_certificate("clients", expiring)
    server.watch_memory(MemoryBudget(1))
    server.watch_sessions(ConnectionCounts)
    found: dict[str, set[str]] = {"up": {"job", "instance"}}
    for family in [*node.registry.collect(), *server.registry.collect()]:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = {label for sample in family.samples for label in sample.labels}
    return found


def test_alerts_ask_for_what_is_exported() -> None:
    [group] = yaml.safe_load((EXAMPLES / "prometheus" / "alerts.yml").read_text())["groups"]
    known = exported()
    for rule in group["rules"]:
        asked = set(re.findall(r"\bup\b|\bheinfer_\w+", rule["expr"]))
        assert asked, rule
        assert asked <= set(known), asked - set(known)
        assert rule["labels"]["severity"] in ("page", "ticket")
        shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) - {"instance", "job"}
        [labels] = {frozenset(known[name]) for name in asked if known[name]} or {frozenset(shown)}
        assert shown <= labels, rule["alert"]


def test_outcomes_that_alerts_name_are_outcomes() -> None:
    from trusted_node.serving.interface import Outcome

    named = re.findall(r'outcome=~"([^"]+)"', (EXAMPLES / "prometheus" / "alerts.yml").read_text())
    assert named
    assert {part for group in named for part in group.split("|")} <= {outcome.value for outcome in Outcome}


def test_prometheus_asks_where_metrics_are_under_tls() -> None:
    configuration = yaml.safe_load((EXAMPLES / "prometheus" / "prometheus.yml").read_text())
    assert configuration["rule_files"] == ["alerts.yml"]
    for job in configuration["scrape_configs"]:
        assert job["scheme"] == "https"
        assert set(job["tls_config"]) == {"ca_file", "cert_file", "key_file", "min_version"}
        assert job["metrics_path"] == "/metrics"


# All together


def readme_commands() -> dict[str, list[str]]:
    """The examples' README: `heinfer` command lines by command."""
    return {words[0]: words for words in command_lines((EXAMPLES / "README.md").read_text())}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Placed:
    """A service's command with paths as they are outside of its container, and ports of this machine."""

    def __init__(self, folder: Path, ports: dict[str, int]) -> None:
        self._folder = folder
        self._ports = ports

    def command(self, role: str) -> list[str]:
        return [self.word(role, word) for word in COMPOSE["services"][role]["command"]]

    def probe(self, role: str) -> subprocess.CompletedProcess[str]:
        """Run the image's health check with the service's settings."""
        settings = dict(word.split("=", 1) for word in shlex.split(instructions(DOCKERFILES[role], "ENV")[0]))
        settings |= COMPOSE["services"][role]["environment"]
        url = urlsplit(settings["HEINFER_PROBE_URL"])
        return probe(
            HEINFER_PROBE_URL=f"{url.scheme}://{url.hostname}:{self._ports[str(url.port)]}{url.path}",
            HEINFER_PROBE_TLS=self.word(role, settings["HEINFER_PROBE_TLS"]),
        )

    def word(self, role: str, word: str) -> str:
        """Return what a word of a service's command comes to."""
        if word.startswith("/run/secrets/"):
            return str(self._folder / COMPOSE["secrets"][word.removeprefix("/run/secrets/")]["file"])
        for mount in COMPOSE["services"][role]["volumes"]:
            if Path(word).is_relative_to(mount["target"]):
                return str(self._folder / mount["source"] / Path(word).relative_to(mount["target"]))
        address = re.fullmatch(r"[\w.]+:(\d+)", word)
        return word if address is None else f"127.0.0.1:{self._ports[address[1]]}"


def heinfer(folder: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], cwd=folder, env=child_environment(), capture_output=True, text=True, timeout=60, check=False
    )


def test_compose_file_and_readme_work_together(dense_bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(dense_bundle, tmp_path / "bundle")
    (tmp_path / "tokens").mkdir()
    commands = readme_commands()
    for name in ("certs", "token"):
        done = heinfer(tmp_path, commands[name])
        assert done.returncode == 0, done.stderr
    placed = Placed(tmp_path, {port: free_port() for port in ("7700", "7800", "8000", "8001", "9700")})
    np.save(tmp_path / "query.npy", np.zeros((1, 3), np.float32))
    infer = [placed.word("node", word) for word in commands["infer"]]
    with start(tmp_path / "server.log", *placed.command("server")):
        assert placed.probe("node").returncode == 1, "it is not there yet"
        with start(tmp_path / "node.log", *placed.command("node")):
            for role in ROLES:
                assert placed.probe(role).stderr == ""
            assert "1 sample(s)" in heinfer(tmp_path, infer).stdout
            assert "token" in heinfer(tmp_path, infer[: infer.index("--token-file")]).stderr
    for line in (tmp_path / "node.log").read_text().splitlines():
        json.loads(line)
