"""`ddrl audit`: the account of every fragment, for people and for scripts, and its exit code."""

from __future__ import annotations

import json

import pytest
from redis import Redis
from support.commands import call, call_json, run
from support.store import append, make_run, take

from ddrl.store import keys, leases, ledger, runs, stream
from ddrl.store.ledger import Row


def fill(client: Redis, run: str, fragments: dict[int, range], *, size: int = 10) -> None:
    """Append fragments of these numbers, by producer; producer 2 plays on host h2, the others on h1."""
    for producer, seqs in fragments.items():
        for seq in seqs:
            append(client, run, seq, producer=producer, size=size, host="h2" if producer == 2 else "h1")


def put_rows(client: Redis, run: str, num_read: int, *counts: tuple[int, int, int, int]) -> int:
    """Store the learner's counts of producers 1, 2, ... after `num_read` entries; return its fencing token.

    They are the numbers of fragments consumed, refused and unread, and the last sequence number.
    """
    token = take(client, run)
    rows = {producer: Row(*row[:3], 7, row[3]) for producer, row in enumerate(counts, 1)}
    ledger.put(client, run, token, rows, stream.read(client, run, b"0-0", count=num_read)[-1].entry_id)
    return token


def test_every_entry_of_a_balanced_run_is_counted(client: Redis) -> None:
    run = make_run(client)
    assert "nothing was appended yet" in call("audit")
    fill(client, run, {1: range(6), 2: range(4)})
    fill(client, run, {2: [3, 3]})  # repeated: two duplicates
    # All six of producer 1 were read or trimmed, and the first of producer 2 was read.
    token = put_rows(client, run, 7, (4, 1, 1, 5), (1, 0, 0, 0))
    client.xadd(keys.experience(run), {"h": "junk"})
    lines = call("audit", run[:5]).splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["producer", "host", "appended", "consumed", "waiting", "trimmed", "refused", "repeated", "missing"],
        ["1", "h1", "6", "4", "0", "1", "1", "0", "0"],
        ["2", "h2", "4", "1", "3", "0", "0", "2", "0"],
        ["total", "2", "producers", "10", "5", "3", "1", "1", "2", "0"],
    ]
    assert f"{run}: balanced: 10 appended = 5 consumed + 3 waiting + 1 trimmed + 1 refused" in lines
    assert any("1 entries that no append wrote" in line for line in lines)
    assert any(line.startswith("waiting: ") and "last report" in line for line in lines)
    leases.release(client, run, token)
    assert "the next learner reads them" in call("audit")
    report = call_json("audit")
    assert report["balanced"] and report["run"] == run and report["unknown"] == 1
    assert report["totals"]["appended"] == 10 and report["totals"]["duplicates"] == 2
    assert report["producers"][1] == {
        **{"producer": 2, "host": "h2", "appended": 4, "consumed": 1, "waiting": 3, "trimmed": 0},
        **{"refused": 0, "duplicates": 2, "difference": 0},
    }


def test_missing_fragments_are_named_with_exit_code_1(client: Redis) -> None:
    name = make_run(client)
    fill(client, name, dict.fromkeys((1, 2, 3), range(5)))
    put_rows(client, name, 15, (3, 0, 0, 4), (6, 0, 0, 4), (5, 0, 0, 4))
    text, document = run("audit"), run("audit", "--json")
    missing = "not balanced: producers 1 on h1 (2 not accounted for), 2 on h2 (1 counted twice)"
    assert text.code == document.code == 1 and missing in text.out
    report = json.loads(document.out)
    assert not report["balanced"] and [row["difference"] for row in report["producers"]] == [2, -1, 0]


def test_many_producers_and_long_streams(client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddrl.cli.output.PROGRESS_S", 0.0)
    monkeypatch.setattr(stream, "REPLY_BYTES", 20_000)  # so that it takes many replies
    name = make_run(client)
    fill(client, name, dict.fromkeys(range(1, 61), range(2)), size=500)
    shortened = run("audit")
    assert "read 120 of at most 120 entries" in shortened.err and shortened.err.count("read ") > 2
    assert "20 other producers not shown" in shortened.err
    for text, rows in ((shortened.out, 40), (call("audit", "--all"), 60)):
        assert sum(line.split()[1:2] in (["h1"], ["h2"]) for line in text.splitlines()) == rows
    assert call_json("audit")["totals"]["waiting"] == 120
    assert runs.state(client, name).appended_fragments == 120
