"""Bad input is refused in one line; refusals.json holds the messages, beside those of commit d5b9061 ("was")."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.refusals import outcomes

from ddrl.store import connection, runs

GOLDEN = json.loads(Path(__file__).with_name("refusals.json").read_text("utf-8"))


def test_bad_input_is_refused_in_one_line(
    server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(connection.URL_VARIABLE, server.url)
    monkeypatch.chdir(tmp_path)
    for row, (code, error) in zip(GOLDEN, outcomes([row["line"] for row in GOLDEN]), strict=True):
        assert (code, error) == (row["code"], row["now"]), row["line"]
        assert code != 0 and error.startswith("ddrl: error: ") and "\n" not in error
    assert len(runs.names(server.client)) == 2 and not Path("runs").exists()  # none made a third run
