"""One learner writes to a run; a learner that was replaced writes nothing."""

from __future__ import annotations

import pytest
from redis import Redis
from support.store import take

from ddrl.store import checkpoints, keys, leases, runs, stream, weights


def test_a_token_that_an_older_server_has_forgotten_is_refused(client: Redis, run: str) -> None:
    before = client.hgetall(keys.state(run))
    token = take(client, run)
    client.delete(keys.state(run), keys.lease(run))
    client.hset(keys.state(run), mapping=before)
    with pytest.raises(leases.RunGoneError, match="or older"):
        leases.renew(client, run, token)
    with pytest.raises(leases.RunGoneError, match="or older"):
        runs.set_status(client, run, "failed", "", token=token)
    again = take(client, run)
    assert again != token and again >> 16 == token >> 16
    with pytest.raises((leases.RunGoneError, leases.LeaseLostError)):
        leases.renew(client, run, token)
    assert runs.status(client, run) == "active"


def test_only_one_learner_holds_a_run_and_a_replaced_one_writes_nothing(client: Redis, run: str) -> None:
    old = take(client, run)
    assert leases.acquire(client, run, host="there", folder="/") is None
    client.delete(keys.lease(run))  # expired
    leases.renew(client, run, old)  # still free: it goes on
    client.delete(keys.lease(run))
    new = take(client, run)
    assert new > old
    attempts = [
        lambda: leases.renew(client, run, old),
        lambda: stream.allow(client, run, old, 10, updates=0),
        lambda: stream.trim(client, run, old, b"0-1"),
        lambda: stream.refuse(client, run, old, b"1-0", b"", "why"),
        lambda: weights.publish(client, run, old, version=0, blob=b"x", allowance=1, updates=0),
        lambda: weights.mark_best(client, run, old, 0, 1.0),
        lambda: checkpoints.save(client, run, old, b"x", {}),
        lambda: runs.note_evaluation(client, run, old, {}),
        lambda: runs.set_status(client, run, "time", "too late", token=old),
    ]
    for attempt in attempts:
        with pytest.raises(leases.LeaseLostError):
            attempt()
    assert weights.index(client, run).latest == -1 and checkpoints.load(client, run) is None
    leases.release(client, run, old)  # must not free the other's
    assert client.exists(keys.lease(run)) and runs.status(client, run) == "active"
    assert runs.set_status(client, run, "time", "in time", token=new)
    assert runs.set_status(client, run, "active", "by the operator")  # who needs no lease
    leases.release(client, run, new)
    assert not client.exists(keys.lease(run))
