"""Learners that learn a run together are killed and stopped: those left go on, and nothing is consumed twice."""

from __future__ import annotations

import random
import signal

import pytest
from support.fault_fleet import ENDLESS, Fleet
from support.processes import EXACT, Process, bound

from ddrl.store import learners

pytestmark = pytest.mark.faults
FLEET = {
    "sections": {**ENDLESS, "learner": {"num_learners": 2, "checkpoint_every_s": 1.0, "rank_timeout_s": 2.0}}
}


def learning(fleet: Fleet) -> list[Process]:
    """Return the processes of the group of two, the leader first."""
    if sum(one.running for one in fleet.processes.started if "learner" in one.log.name) < 2:
        fleet.start_learner()
    found: dict[int, Process] = {}  # by rank

    def is_whole() -> bool:
        running = {one.pid: one for one in fleet.processes.started if one.running}
        members = learners.by_rank(fleet.client, fleet.run)
        found.clear()
        found.update({one.rank: running[one.pid] for one in members if one.pid in running})
        return {0, 1} <= found.keys()

    fleet.processes.until(is_whole, bound(30.0))
    return [found[0], found[1]]


@pytest.mark.timeout(900)
@pytest.mark.long
def test_learners_of_a_group_killed_at_random(fleet: Fleet) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for number in range(20 if EXACT else 3):
        lead, follower = learning(fleet)
        assert fleet.learner in (lead, follower)
        with fleet.survives(15.0):
            victim = (lead, follower)[number] if number < 2 else draw.choice((lead, follower))
            victim.kill()
            fleet.learner = lead if victim is follower else follower
            fleet.start_learner()  # it is ready when the group wants one more
    assert fleet.audit().total("refused") == fleet.audit().unknown == 0


def test_a_follower_that_is_stopped_is_left_behind(fleet: Fleet) -> None:
    _, follower = learning(fleet)
    with fleet.survives(15.0):
        follower.send_signal(signal.SIGSTOP)
        fleet.processes.until(
            lambda: [one.rank for one in learners.by_rank(fleet.client, fleet.run)] == [0], bound(20.0)
        )
    follower.send_signal(signal.SIGCONT)
    learning(fleet)
