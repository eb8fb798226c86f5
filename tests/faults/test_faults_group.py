"""Learners that learn a run together are killed and stopped: those left go on, and nothing is consumed twice."""

from __future__ import annotations

import random
import signal
import time

import pytest
from support.fault_fleet import ENDLESS, Fleet
from support.processes import EXACT, Process, bound

from ddrl.store import learners

pytestmark = pytest.mark.faults
NUM = 3
FLEET = {
    "sections": {
        **ENDLESS,
        "learner": {"num_learners": NUM, "checkpoint_every_s": 1.0, "rank_timeout_s": 2.0},
    }
}


def learning(fleet: Fleet) -> list[Process]:
    """Return the processes of the whole group, the leader first."""
    running = {one.pid: one for one in fleet.processes.started if one.running and "learner" in one.log.name}
    for _ in range(NUM - len(running)):
        started = fleet.start_learner()
        running[started.pid] = started
    found: dict[int, Process] = {}  # by rank

    def is_whole() -> bool:
        members = learners.by_rank(fleet.client, fleet.run)
        found.clear()
        found.update({one.rank: running[one.pid] for one in members if one.pid in running})
        return {*range(NUM)} <= found.keys()

    fleet.processes.until(is_whole, bound(30.0))
    return [found[rank] for rank in range(NUM)]


@pytest.mark.timeout(1800)
@pytest.mark.long
def test_learners_of_a_group_killed_at_random(fleet: Fleet) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for number in range(20 if EXACT else 3):
        group = learning(fleet)
        assert fleet.learner in group
        with fleet.survives(5.0):
            formed, rank = (
                learners.formed(fleet.client, fleet.run),
                number if number < 2 else draw.randrange(NUM),
            )
            assert formed is not None
            killed_at = time.monotonic()
            group.pop(rank).kill()
            fleet.learner = group[0]
            fleet.start_learner()  # it is ready when the group wants one more

            def is_new(before: str = formed.number) -> bool:
                now = learners.formed(fleet.client, fleet.run)
                return now is not None and now.number != before

            fleet.processes.until(is_new, bound(10.0 if rank else 15.0))
            fleet.goes_on(bound(10.0))
            print(f"rank {rank} killed: updates again after {time.monotonic() - killed_at:.1f} s")
    assert fleet.audit().total("refused") == fleet.audit().unknown == 0


def test_a_follower_that_is_stopped_is_left_behind(fleet: Fleet) -> None:
    *_, follower = learning(fleet)
    with fleet.survives(15.0):
        follower.send_signal(signal.SIGSTOP)
        fleet.processes.until(
            lambda: [one.rank for one in learners.by_rank(fleet.client, fleet.run)] == [0, 1], bound(20.0)
        )
    follower.send_signal(signal.SIGCONT)
    learning(fleet)
