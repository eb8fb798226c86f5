"""Bad input is refused in one line, with the exit code of commit d5b9061 and a message at least as clear.

`pytest tests/cli/test_refusals.py -s` prints the messages of that commit (refusals.json) above the present ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.refusals import outcomes

from ddrl.store import connection

FORMER = {
    row["line"]: row for row in json.loads(Path(__file__).with_name("refusals.json").read_text("utf-8"))
}


def test_bad_input_is_refused_in_one_line(
    server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(connection.URL_VARIABLE, server.url)
    monkeypatch.chdir(tmp_path)
    found = list(outcomes())
    for line, _, error in found:
        print(f"ddrl {line}\n  was {FORMER[line]['error']}\n  now {error}")
    assert [line for line, *_ in found] == list(FORMER)
    for line, code, error in found:
        assert code == FORMER[line]["code"], (line, error)
        assert error.startswith("ddrl: error: ") and "\n" not in error, (line, error)
