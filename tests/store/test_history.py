"""The thinned history of a run."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from redis import Redis
from support.store import make_run, take

from ddrl.store import history, keys
from ddrl.store.connection import LeaseLostError
from ddrl.store.history import History, Row


def episodes(*steps: int, begin: int = 0) -> list[Row]:
    return [{"time_s": begin + at, "env_steps": num, "return": 1.5} for at, num in enumerate(steps)]


def steps_kept(client: Redis, run: str, table: str = "episodes") -> list[int]:
    return [row["env_steps"] for row in history.read(client, run)[table]]


def test_rows_are_as_close_as_a_curve_shows_and_grow_with_the_logarithm(client: Redis) -> None:
    run = make_run(client)
    kept = History(client, run, take(client, run))
    every, last = 1_000, 30_000_000
    for begin in range(0, last, last // 10):
        steps = range(begin + every, begin + last // 10 + 1, every)
        kept.add({"metrics": [], "episodes": episodes(*steps, begin=begin)})
    found = steps_kept(client, run)
    assert found[0] == every and found[-1] > last / 1.003
    assert all(after <= before * history.GROWTH + every for before, after in pairwise(found))
    assert len(found) < 500 + math.log(last / (500 * every)) / math.log(history.GROWTH) + 2 < 3_000


def test_another_learner_goes_on_where_the_one_before_was(client: Redis) -> None:
    run = make_run(client)
    first = take(client, run)
    History(client, run, first).add({"metrics": [], "episodes": episodes(100, 200, 300)})
    second = take(client, run)
    kept = History(client, run, second)
    again = episodes(100, 200, 300, 300, 400)  # all that the stream has: the first three are known
    for _ in range(2):
        kept.add({"metrics": [], "episodes": again})
    assert steps_kept(client, run) == [100, 200, 300, 400]
    with pytest.raises(LeaseLostError):
        History(client, run, first).add({"metrics": [], "episodes": episodes(500, begin=9)})


def test_a_run_that_went_back_goes_on(client: Redis) -> None:
    run = make_run(client)
    kept = History(client, run, take(client, run))
    kept.add({"metrics": [], "episodes": episodes(1_000, 2_000, 1_500, 1_501, 1_600)})
    assert steps_kept(client, run) == [1_000, 2_000, 1_500, 1_600]


def test_metrics_count_updates_too(client: Redis) -> None:
    """A learner learns on while nobody plays; rows in which nothing has grown are left out."""
    run = make_run(client)
    kept = History(client, run, take(client, run))
    rows: list[Row] = [
        {"time_s": float(at), "env_steps": steps, "updates": updates}
        for at, (steps, updates) in enumerate([(0, 0), (0, 0), (100, 0), (100, 0), (100, 50)])
    ]
    kept.add({"metrics": rows, "episodes": []})
    assert history.read(client, run) == {"metrics": [rows[0], rows[2], rows[4]], "episodes": []}
    assert client.exists(keys.history(run))
