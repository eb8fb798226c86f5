"""One learner writes to a run; a learner that was replaced writes nothing."""

from __future__ import annotations

import pytest
from redis import Redis
from support.store import make_run, take

from ddrl.store import checkpoints, keys, runs, stream, weights
from ddrl.store import leases as lease


@pytest.fixture
def client(server) -> Redis:
    return server.client


@pytest.fixture
def run(client: Redis) -> str:
    return make_run(client)


def test_a_token_that_an_older_server_has_forgotten_is_refused(client: Redis, run: str) -> None:
    before = client.hgetall(keys.state(run))
    token = take(client, run)
    client.delete(keys.state(run), keys.lease(run))
    client.hset(keys.state(run), mapping=before)
    for write in (
        lambda: lease.renew(client, run, token),
        lambda: runs.set_status(client, run, "failed", "", token=token),
    ):
        with pytest.raises(lease.RunGoneError, match="or older"):
            write()
    again = take(client, run)
    assert again != token and again >> 16 == token >> 16
    with pytest.raises((lease.RunGoneError, lease.LeaseLostError)):
        lease.renew(client, run, token)
    assert runs.status(client, run) == "active"


def test_only_one_learner_holds_a_run_and_a_replaced_one_writes_nothing(client: Redis, run: str) -> None:
    old = take(client, run)
    assert lease.acquire(client, run, host="there", folder="/") is None
    client.delete(keys.lease(run))  # expired
    lease.renew(client, run, old)  # still free: it goes on
    client.delete(keys.lease(run))
    new = take(client, run)
    assert new > old
    attempts = [
        lambda: lease.renew(client, run, old),
        lambda: stream.allow(client, run, old, 10, updates=0),
        lambda: stream.trim(client, run, old, b"0-1"),
        lambda: stream.refuse(client, run, old, b"1-0", b"", "why"),
        lambda: weights.publish(client, run, old, version=0, blob=b"x", allowance=1, updates=0),
        lambda: weights.mark_best(client, run, old, 0, 1.0),
        lambda: checkpoints.save(client, run, old, b"x", {}),
        lambda: runs.note_evaluation(client, run, old, {}),
    ]
    for attempt in attempts:
        with pytest.raises(lease.LeaseLostError):
            attempt()
    assert weights.index(client, run).latest == -1 and checkpoints.load(client, run) is None
    lease.release(client, run, old)  # must not free the other's
    assert client.exists(keys.lease(run))
    lease.release(client, run, new)
    assert not client.exists(keys.lease(run))
