"""Log lines as text and as JSON: one way for all loggers, fields from a closed list, and no messages of exceptions."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from typer.testing import CliRunner

from heinfer.cli import logs, main
from heinfer.client import connect
from heinfer.processes import child_environment
from tests.parties import REPOSITORY, start
from trusted_node.serving.interface import Channel, FinishedQuery, Outcome
from trusted_node.serving.query_log import log_query
from trusted_node.statistics import QueryStatistics

RFC_3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


def record(message: str = "said", *arguments: object, **extra: object) -> logging.LogRecord:
    """Return what a logger would make."""
    return logging.getLogger("heinfer.test").makeRecord(
        "heinfer.test", logging.INFO, "file.py", 1, message, arguments, None, extra=extra
    )


def as_json(given: logging.LogRecord) -> dict[str, Any]:
    line = logs.JsonFormatter().format(given)
    assert "\n" not in line
    return json.loads(line)


def test_a_line_of_json_has_time_level_logger_message_and_the_fields_that_are_known() -> None:
    line = as_json(record("block %d", 3, block=3, ms=1.23456, model="m", outcome=None))
    assert RFC_3339.fullmatch(line["time"])
    said = datetime.fromisoformat(line.pop("time"))
    assert abs(datetime.now(UTC) - said) < timedelta(minutes=1)
    expected = {"level": "INFO", "logger": "heinfer.test", "message": "block 3", "model": "m", "block": 3, "ms": 1.235}
    assert line == expected


def test_what_is_no_known_field_is_not_written_and_no_array_is_either() -> None:
    line = as_json(record(values=[1.5, 2.5], scale=0.125, ms=np.array([0.75, 0.25]), block=np.float32(0.3)))
    assert set(line) == {"time", "level", "logger", "message", "ms", "block"}
    assert line["ms"] == "ndarray"
    assert line["block"] == "float32"


def test_line_ends_in_a_message_do_not_make_a_line() -> None:
    assert as_json(record("one\ntwo %s", 'three"\r\n{'))["message"] == 'one\ntwo three"\r\n{'

    text = logs.TextFormatter("%(message)s").format(record("one\n2026 INFO %s\x1b[2J é", "two\r"))
    assert text == r"one\n2026 INFO two\r\x1b[2J é"


def failing() -> logging.LogRecord:
    """Return a record of an exception, and of its cause, whose messages quote data."""

    def inner() -> None:
        raise ValueError("patient 3.14159")

    try:
        try:
            inner()
        except ValueError as error:
            raise RuntimeError("value 2.71828") from error
    except RuntimeError:
        made = record("preparing failed")
        made.exc_info = sys.exc_info()
        return made


@pytest.mark.parametrize("form", get_args(logs.Format))
def test_of_an_exception_its_type_and_places_are_written_and_not_its_message(form: str) -> None:
    formatter = logs.JsonFormatter() if form == "json" else logs.TextFormatter("%(message)s")
    line = formatter.format(failing())
    assert "3.14159" not in line
    assert "2.71828" not in line
    assert "patient" not in line
    for part in ("RuntimeError at ", "caused by ValueError at ", "test_logs.py:", " inner", " failing"):
        assert part in line


def test_an_exception_that_causes_itself_is_written_once() -> None:
    error = ValueError("x")
    error.__context__ = RuntimeError("y")
    error.__context__.__context__ = error
    assert logs.describe_exception(error).count("Error at") == 2
    assert logs.describe_exception(None) == ""


_PROGRAM = """
import logging, sys, warnings
import uvicorn
uvicorn.Config(app=None)                                 # sets up loggers of its own
from heinfer.cli.logs import set_up_logging
set_up_logging(logging.INFO, sys.argv[1])
set_up_logging(logging.INFO, sys.argv[1])                # twice is once
logging.getLogger("uvicorn.access").info("access")
logging.getLogger("uvicorn.error").warning("uvicorn")
logging.getLogger("grpc._server").error("grpc")
logging.getLogger("trusted_node.pool").info("ours", extra={"ms": 1.5})
logging.getLogger("trusted_node.pool").debug("not at this level")
"""


@pytest.mark.parametrize("form", get_args(logs.Format))
def test_lines_of_libraries_go_the_same_way_as_ours(form: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, form],
        capture_output=True, check=True, cwd=REPOSITORY, text=True, env=child_environment(),
    )  # fmt: skip
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 4
    if form == "json":
        parsed = [json.loads(line) for line in lines]
        assert [line["message"] for line in parsed] == ["access", "uvicorn", "grpc", "ours"]
        assert parsed[3]["ms"] == 1.5
    else:
        assert [line.rpartition(": ")[2] for line in lines] == ["access", "uvicorn", "grpc", "ours"]


def test_a_finished_query_is_a_line_with_its_parts(caplog: pytest.LogCaptureFixture) -> None:
    statistics = QueryStatistics.empty(2, 2)
    statistics.mode = "prepared"
    statistics.add(0, server_s=0.001, encrypt_s=0.002)
    statistics.add(1, server_s=0.003)
    statistics.raise_bounds(0.0625, 0.03125)
    with caplog.at_level(logging.INFO):
        log_query(FinishedQuery("m", Channel.GRPC, "id-1", 1, 8, 0.0005, 0.0125, Outcome.OK, statistics))
        log_query(FinishedQuery("m", Channel.HTTP, "id-2", 1, 0, 0.0, 0.0001, Outcome.BUSY, None))
    ran, refused = map(as_json, caplog.records)
    assert ran["message"].startswith("query id-1 of m by grpc: ok, 1 samples of 8 in 12.5 ms (queue 0.5, prepare 0.0, ")
    fields = {
        name: ran[name] for name in ("request_id", "model", "channel", "outcome", "mode", "samples", "joined", "ms")
    }
    assert list(fields.values()) == ["id-1", "m", "grpc", "ok", "prepared", 1, 8, 12.5]
    assert (ran["server_ms"], ran["encrypt_ms"], ran["queue_ms"], ran["wire_ms"]) == (4.0, 2.0, 0.5, 0)
    assert refused["message"] == "query id-2 of m by http: busy, 1 samples of 0 in 0.1 ms (queue 0.0)"
    assert not {"mode", "server_ms"} & set(refused)
    assert not re.search(r"0\.0625|0\.03125|62\.5|31\.25", f"{ran}{refused}")


def test_a_finished_query_costs_nothing_where_nobody_reads_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        log_query(FinishedQuery("m", Channel.GRPC, "id-1", 1, 8, 0.0, 0.0, Outcome.OK, None))
    assert not caplog.records


def test_another_format_is_a_usage_error() -> None:
    done = CliRunner().invoke(main.app, ["--log-format", "xml", "serve", "nothing"])
    assert done.exit_code == 2


@pytest.mark.slow
def test_both_parties_write_nothing_but_json(dense_bundle: Path, tmp_path: Path) -> None:
    verbose = ("-v", "--log-format", "json")
    with (
        start(tmp_path / "server", *verbose, "serve", f"{dense_bundle}/server", "--listen", "127.0.0.1:0") as server,
        start(
            tmp_path / "node", *verbose, "node", f"{dense_bundle}/node", "--listen", "127.0.0.1:0",
            "--server", server.address, "--prepared", "0",
        ) as node,
        connect(node.address) as model,
    ):  # fmt: skip
        model.predict(np.array([[0.3, 0.4, 0.5]], np.float32))
    ours = [json.loads(line) for line in node.said().splitlines()]
    theirs = [json.loads(line) for line in server.said().splitlines()]
    (query,) = [line for line in ours if line["logger"] == "trusted_node.serving.query_log"]
    assert (query["outcome"], query["channel"], query["samples"], query["mode"]) == ("ok", "frames", 1, "prepared")
    assert re.fullmatch("[0-9a-f]{16}", query["request_id"])
    requests = [line for line in theirs if "rows in" in line["message"]]
    assert {line["block"] for line in requests} == {0, 1}
    assert all(re.fullmatch("[0-9a-f]{8}", line["session"]) and line["ms"] >= 0 for line in requests)
