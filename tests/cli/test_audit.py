"""`ddrl audit`: the account of every fragment, for people and for scripts, and its exit code."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import commands
from support.commands import Printed
from support.store import make_run

from ddrl.store import leases, ledger, runs, stream
from ddrl.store.ledger import Row


def append(client: Any, run: str, producer: int, seqs: range, *, host: str = "h1", size: int = 10) -> None:
    fields, origin = {b"h": b"{}", b"x": b"y" * size}, {"host": host, "node": f"ddrl-1@{host}"}
    for seq in seqs:
        ids = {"producer": producer, "incarnation": 1, "seq": seq}
        stream.append(client, run, fields, num_transitions=8, **ids, **origin)


def audit(*arguments: str, code: int = 0) -> Printed:
    printed = commands.run("audit", *arguments)
    assert printed.code == code
    return printed


def put_rows(client: Any, run: str, num_read: int, rows: dict[int, Row]) -> int:
    """Store the learner's rows of the first `num_read` entries; return its fencing token."""
    token = leases.acquire(client, run, host="here", folder="")
    assert token is not None
    cursor = stream.read(client, run, b"0-0", count=num_read)[-1].entry_id
    ledger.put(client, run, token, rows, cursor)
    return token


def test_a_balanced_run(client: Any) -> None:
    run = make_run(client)
    assert "nothing was appended yet" in audit().out
    append(client, run, 1, range(6))
    append(client, run, 2, range(4), host="h2")
    append(client, run, 2, range(2, 4), host="h2")  # repeated: two duplicates
    # All six of producer 1 and the first of producer 2 are read.
    token = put_rows(client, run, 7, {1: Row(5, 1, 0, 1, 5), 2: Row(1, 0, 0, 1, 0)})
    printed = audit(run[:5])
    lines = printed.out.splitlines()
    header = "producer host appended consumed waiting trimmed refused repeated missing"
    assert lines[0].split() == header.split()
    assert lines[1].split() == ["1", "h1", "6", "5", "0", "0", "1", "0", "0"]
    assert lines[2].split() == ["2", "h2", "4", "1", "3", "0", "0", "2", "0"]
    assert lines[3].split() == ["total", "2", "producers", "10", "6", "3", "0", "1", "2", "0"]
    assert f"{run}: balanced: 10 appended = 6 consumed + 3 waiting + 0 trimmed + 1 refused" in lines
    assert any(line.startswith("waiting: ") and "last report" in line for line in lines)
    leases.release(client, run, token)
    assert "the next learner reads them" in audit().out
    report = json.loads(audit("--json").out)
    assert report["balanced"] and report["run"] == run and report["unknown"] == 0
    assert report["totals"]["appended"] == 10 and report["totals"]["duplicates"] == 2
    assert report["producers"][1] == {
        **{"producer": 2, "host": "h2", "appended": 4, "consumed": 1, "waiting": 3, "trimmed": 0},
        **{"refused": 0, "duplicates": 2, "difference": 0},
    }


def test_missing_fragments_are_named_with_exit_code_1(client: Any) -> None:
    run = make_run(client)
    append(client, run, 1, range(5))
    append(client, run, 2, range(5), host="h2")
    append(client, run, 3, range(5))
    put_rows(client, run, 15, {1: Row(3, 0, 0, 1, 4), 2: Row(6, 0, 0, 1, 4), 3: Row(5, 0, 0, 1, 4)})
    out = audit(code=1).out
    assert "not balanced: producers 1 on h1 (2 not accounted for), 2 on h2 (1 counted twice)" in out
    report = json.loads(audit("--json", code=1).out)
    assert not report["balanced"] and [row["difference"] for row in report["producers"]] == [2, -1, 0]


def test_trimmed_and_unknown_entries_are_counted(client: Any) -> None:
    run = make_run(client)
    append(client, run, 1, range(5))
    put_rows(client, run, 5, {1: Row(3, 0, 2, 1, 4)})
    client.xadd(f"ddrl:{{{run}}}:experience", {"h": "junk"})
    out = audit().out
    assert "5 appended = 3 consumed + 0 waiting + 2 trimmed + 0 refused" in out
    assert "1 entries that no append wrote" in out


def test_many_producers_and_long_streams(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddrl.cli.output.PROGRESS_S", 0.0)
    monkeypatch.setattr(stream, "REPLY_BYTES", 20_000)  # so that it takes many replies
    run = make_run(client)
    for producer in range(1, 61):
        append(client, run, producer, range(2), size=500)
    printed = audit()
    assert "read 120 of at most 120 entries" in printed.err and printed.err.count("read ") > 2
    assert "20 balanced producers not shown" in printed.err
    assert len([line for line in printed.out.splitlines() if line.split()[1:2] == ["h1"]]) == 40
    assert len([line for line in audit("--all").out.splitlines() if line.split()[1:2] == ["h1"]]) == 60
    assert json.loads(audit("--json").out)["totals"]["waiting"] == 120
    assert runs.state(client, run).appended_fragments == 120
