"""The on-policy queue: order, staleness, step budget, against a simulated fleet; and trajectories against a walk."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_items import Lane, Player
from support.replays import changed

from ddrl.algorithms.ppo.config import Config
from ddrl.config import OnPolicyConfig
from ddrl.networks.ranks import Ranks
from ddrl.replay.fifo import Fifo, trajectories
from ddrl.types import EnvSpec, Fragment, Played, Trajectories

B = 32


def playable(made: Fragment, **columns: Any) -> Fragment:
    """With the log probabilities that on-policy learning needs; they differ from step to step."""
    log_prob = np.random.default_rng(made.seq).normal(size=made.reward.shape).astype(np.float32)
    return changed(made, **{"behavior_log_prob": log_prob} | columns)


def fragment(version: int, *, num_steps: int = 4, producer: int = 0, seq: int = 0) -> Fragment:
    """T steps of 2 environments whose rewards name their version and producer."""
    made = Player(seq, end_probability=0.1).fragment(num_steps)
    reward = np.full(made.reward.shape, 1000 * version + producer, np.float32)
    return playable(made, producer=producer, seq=seq, policy_version=version, reward=reward)


SPEC = EnvSpec("Toy-v0", (4,), "float32", "discrete", (), (6,))


def make(*, ranks: Ranks | None = None, **on_policy: Any) -> Fifo:
    """A queue with batches of B transitions."""
    options = Config(batch_size=B, minibatch_size=B, gamma=0.9)
    return Fifo(options, OnPolicyConfig(**on_policy), SPEC, ranks=ranks)


def fill(fifo: Fifo, *played: int, version: int = 0) -> None:
    """Admit fragments of these versions, from a producer each, as entries b"0-0", b"1-0", ..."""
    for number, one in enumerate(played):
        fifo.admit(fragment(one, producer=number, seq=number), b"%d-0" % number, version=version)


def draw(fifo: Fifo, version: int) -> Trajectories | None:
    return fifo.draw(num_steps=0, num_updates=0, version=version)


def versions(batch: Trajectories) -> set[int]:
    """Return the versions of the fragments in a batch."""
    return {int(reward) // 1000 for reward in batch.reward[batch.valid]}


def test_each_fragment_is_drawn_once_whole_and_in_order() -> None:
    fifo, drawn, left = make(), [], []
    fill(fifo, *[0] * 9)  # 8 transitions each
    assert (len(fifo), fifo.oldest_entry_id, fifo.num_collectors) == (72, b"0-0", 1)
    for version in range(2):
        batch = draw(fifo, version)
        assert batch is not None and batch.valid.sum() == B
        drawn.append(sorted({int(reward) for reward in batch.reward[batch.valid]}))
        left.append((len(fifo), fifo.oldest_entry_id, fifo.num_collectors))
    assert drawn == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert left == [(40, b"4-0", 9), (8, b"8-0", 1)]  # nobody has sent since the first draw
    assert draw(fifo, 2) is None, "less than a batch waits"


def test_what_an_iteration_does_not_need_stays_in_the_stream() -> None:
    fifo = make()
    rooms = []
    for _ in range(B // 8 + 1):
        rooms.append(fifo.has_room())
        fill(fifo, 0)
    assert rooms == [True] * (B // 8) + [False]
    assert draw(fifo, 0) is not None and fifo.has_room()


def test_columns_that_are_not_learned_from_are_not_held() -> None:
    one = playable(Player(continuous=True).fragment(3), junk=np.zeros((1, 10**6), np.uint8))
    assert make().pack(one).extras.keys() == {"behavior_log_prob"}


def test_a_stale_fragment_is_dropped_and_counted_wherever_it_turned_stale() -> None:
    fifo = make()
    fill(fifo, 3, 2, version=4)  # version 2 is too old on arrival
    assert (fifo.num_dropped, len(fifo)) == (1, 8)
    fill(fifo, 5, 5, 5, version=5)
    assert draw(fifo, 5) is None, "by now version 3 is two versions behind, so less than a batch is left"
    assert (fifo.num_dropped, len(fifo), fifo.oldest_entry_id) == (2, 24, b"0-0")
    fill(fifo, 5, version=5)
    batch = draw(fifo, 5)
    assert batch is not None and versions(batch) == {5}
    fill(fifo, 6, 7, 2**53, version=5)  # 6 may be on its way; a worker may name any
    assert (fifo.num_dropped, fifo.num_waiting) == (4, 1)
    figures = fifo.figures(num_steps=0, num_updates=0)
    assert figures == {"queued_steps": 8, "dropped": 4, "staleness": 0, "max_staleness": 0}


def test_correct_keeps_stale_fragments_and_reports_their_staleness() -> None:
    fifo = make(stale="correct")
    fill(fifo, 0, 1, 2, 3, version=9)
    assert draw(fifo, 9) is not None
    figures = fifo.figures(num_steps=0, num_updates=0)
    assert (figures["dropped"], figures["staleness"], figures["max_staleness"]) == (0, 7.5, 9)
    assert "staleness" not in fifo.figures(num_steps=0, num_updates=0), "of what was learned from since"


@pytest.mark.parametrize(("collect", "lead"), [("sync", 0), ("async", 2)])
def test_the_step_budget_grows_with_the_version_not_with_the_draw(collect: str, lead: int) -> None:
    fifo = make(collect=collect, max_staleness=2)

    def budget(num_steps: int, version: int) -> int:
        return fifo.step_budget(num_steps=num_steps, num_updates=0, version=version)

    assert budget(0, 0) == (1 + lead) * B
    fill(fifo, *[0] * 5)
    assert budget(40, 0) == (1 + lead) * B
    assert draw(fifo, 0) is not None
    assert budget(40, 0) == (1 + lead) * B, "the batch is not done yet"
    assert budget(40, 1) == B + (1 + lead) * B, "with its version it is"
    fifo.admit(fragment(0), b"9-0", version=5)  # 8 stale transitions of a process that slept
    assert budget(48, 1) == 8 + B + (1 + lead) * B, "dropped steps are given back"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_fleet_can_stall_it_or_make_it_learn_from_stale_fragments(data: st.DataObject) -> None:
    """Processes that play, wait, sleep for long, or die; a server that counts; a learner that takes its time."""
    collect = data.draw(st.sampled_from(["sync", "async"]))
    bound = data.draw(st.integers(1 if collect == "async" else 0, 3))
    lag = data.draw(st.integers(0, bound))
    num_processes = data.draw(st.integers(1, 4))
    fifo = make(collect=collect, max_staleness=bound, forced_lag=lag)
    version = appended = iterations = 0
    budget = fifo.step_budget(num_steps=0, num_updates=0, version=0)
    in_hand: list[int | None] = [None] * num_processes  # version under which each plays now
    seqs = [0] * num_processes
    learning: int | None = None  # the version whose successor is being made
    for _ in range(data.draw(st.integers(10, 80))):
        process = data.draw(st.integers(0, num_processes))
        if process < num_processes:  # begins or ends a fragment
            played = in_hand[process]
            if played is None:
                if appended < budget:
                    in_hand[process] = version
                continue
            num_steps = data.draw(st.integers(1, 9))
            one = fragment(played, num_steps=num_steps, producer=process, seq=seqs[process])
            appended += one.num_transitions
            fifo.admit(one, b"%d-0" % appended, version=version)
            seqs[process], in_hand[process] = seqs[process] + 1, None
        elif learning is not None:  # publishes
            version, learning = learning + 1, None
        else:
            batch = draw(fifo, version)
            if batch is not None:
                learning, iterations = version, iterations + 1
                ages = {version - played for played in versions(batch)}
                assert max(ages) <= bound
                assert batch.valid.sum() >= B
        budget = max(budget, fifo.step_budget(num_steps=appended, num_updates=0, version=version))
        assert appended + sum(played is not None for played in in_hand) * 18 - budget <= num_processes * 18
    # Then one process alone, the others dead: the next iterations come.
    for _ in range(3):
        version, learning = (version, None) if learning is None else (learning + 1, None)
        budget = max(budget, fifo.step_budget(num_steps=appended, num_updates=0, version=version))
        while (batch := draw(fifo, version)) is None:
            budget = max(budget, fifo.step_budget(num_steps=appended, num_updates=0, version=version))
            assert appended < budget, "the last living process waits, and so does the learner"
            one = fragment(version, seq=seqs[0])
            seqs[0] += 1
            appended += one.num_transitions
            fifo.admit(one, b"%d-0" % appended, version=version)
        learning = version


def test_a_forced_lag_is_exact_once_it_has_built_up() -> None:
    fifo = make(max_staleness=3, forced_lag=3)
    version = appended = 0
    seen = []
    while version < 12:
        budget = fifo.step_budget(num_steps=appended, num_updates=0, version=version)
        while appended < budget:
            fifo.admit(fragment(version, seq=appended), b"%d-0" % appended, version=version)
            appended += 8
        batch = draw(fifo, version)
        assert batch is not None
        seen.append({version - played for played in versions(batch)})
        version += 1
    assert seen == [{0}, {1}, {2}, *[{3}] * 9]


# --- trajectories -----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    turns=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5), st.booleans()), min_size=1, max_size=8),
    space=st.sampled_from([((3,), "float32"), ((5, 3), "uint8")]),
    frame_stack=st.sampled_from([1, 3]),
    more_context=st.integers(0, 2),
)
def test_every_step_is_there_once_with_its_neighbors(
    turns: list[tuple[int, int, bool]],
    space: tuple[tuple[int, ...], str],
    frame_stack: int,
    more_context: int,
) -> None:
    """Producers' fragments come interleaved, some missing; producer p plays p + 1 environments."""
    players = [
        Player(p, player=p, num_envs=p + 1, observation=space[0], dtype=space[1], frame_stack=frame_stack)
        for p in range(3)
    ]
    fragments, num_gaps = [], [0, 0, 0]
    # What each lane of the batch must hold.
    lanes: dict[tuple[int, int, int], list[tuple[Lane, int, Any]]] = {}
    for producer, num_steps, is_missing in turns:
        player = players[producer]
        if is_missing:
            player.fragment(2)
            num_gaps[producer] += 1
        one = playable(player.fragment(num_steps, player.context + more_context))
        fragments.append(one)
        for number, lane in enumerate(player.lanes):
            log_prob = one.extras["behavior_log_prob"][one.context :, number]
            steps = zip([lane] * num_steps, range(len(lane) - num_steps, len(lane)), log_prob, strict=True)
            lanes.setdefault((producer, num_gaps[producer], number), []).extend(steps)
    batch = trajectories(fragments, gamma=0.5, frame_stack=frame_stack)
    num_finals = sum(np.count_nonzero(one.truncated[one.context :]) for one in fragments)
    num_inputs = sum((one.num_steps + 1) * one.num_envs for one in fragments) + num_finals
    assert len(batch.observation) == num_inputs, "no row for what only stacks reach into"
    assert not any(values[~batch.valid].any() for values in (batch.discount, batch.continues, batch.reward))
    seen, after = batch.observation[batch.row], batch.observation[batch.next_row]
    places = list(zip(*batch.valid.nonzero(), strict=True))
    assert len(places) == sum(map(len, lanes.values()))
    longest = max(map(len, lanes.values()))
    assert len(batch.valid) == longest and batch.valid.size <= 2 * len(places) + longest
    found = {seen[place].tobytes(): place for place in reversed(places)}
    for expected in lanes.values():
        first, begin, _ = expected[0]
        start, b = found[first.stack(first.begin[begin], begin, frame_stack).tobytes()]
        for t, (lane, step, log_prob) in enumerate(expected, start):
            assert (batch.reward[t, b], batch.action[t, b]) == (lane.reward[step], lane.action[step])
            assert batch.behavior_log_prob[t, b] == log_prob
            assert batch.discount[t, b] == (0.0 if lane.terminated[step] else 0.5)
            ended = lane.terminated[step] or lane.truncated[step]
            assert batch.continues[t, b] == (not ended and t + 1 < start + len(expected))
            begin = lane.begin[step]
            np.testing.assert_array_equal(seen[t, b], lane.stack(begin, step, frame_stack))
            if not lane.terminated[step]:
                np.testing.assert_array_equal(after[t, b], lane.stack(begin, step + 1, frame_stack))


def test_short_fragments_share_lanes() -> None:
    players = [Player(p, player=p, num_envs=1 + p % 2) for p in range(60)]
    batch = trajectories([playable(one.fragment(1 if p else 50)) for p, one in enumerate(players)], gamma=0.5)
    assert batch.valid.shape == (50, 3) and batch.valid.sum() == 50 + 30 * 2 + 29


def test_the_raw_action_is_the_action() -> None:
    one = playable(Player(continuous=True).fragment(3))
    raw = np.random.default_rng(1).normal(size=one.action.shape).astype(np.float32)
    batch = trajectories([changed(one, raw_action=raw)], gamma=0.9)
    assert np.array_equal(batch.action, raw)


COLUMN = np.zeros((3, 2), np.float32)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"behavior_log_prob": None}, "no column behavior_log_prob"),
        ({"behavior_log_prob": COLUMN.astype(np.float64)}, "no column behavior_log_prob, float32"),
        ({"behavior_log_prob": COLUMN[..., None]}, "no column behavior_log_prob"),
        ({"raw_action": COLUMN}, "raw_action differs in shape"),
        ({"raw_action": np.zeros((3, 2, 2), np.float16)}, "or dtype"),
    ],
)
def test_columns_of_another_algorithm_are_refused(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make().pack(playable(Player(continuous=True).fragment(3), **columns))


def test_ranks_share_an_iteration_that_the_leader_has_drawn() -> None:
    """The leader knows of all fragments, and each rank gives its own; one that is stale goes everywhere."""
    queues = [make(ranks=Ranks(rank, 3)) for rank in range(3)]
    for number, version in enumerate([1, 3, 3, 3, 3, 3]):
        made, entry_id = fragment(version, producer=number), b"%d-0" % number
        owner = number % 2  # rank 2 gets nothing
        queues[owner].admit(made, entry_id, version=2)
        if owner:
            queues[0].admit(Played(owner, number, version, made.num_transitions), entry_id, version=2)
    lead = queues[0]
    assert len(lead) == 48
    stale = Played(1, 7, 0, 8)
    assert not lead.admit(stale, b"6-0", version=2) and len(lead) == 48
    batches = [draw(lead, 3), *(one.draw_chosen(lead.chosen) for one in queues[1:])]
    assert (
        lead.chosen == {"sizes": [16, 16, 0], "taken": ["1-0", "3-0"], "last": "4-0"}
        and lead.num_dropped == 2
    )
    producers = [{int(reward) % 1000 for reward in batch.reward[batch.valid]} for batch in batches[:2]]
    assert producers == [{2, 4}, {1, 3}]
    assert batches[2].valid.sum() == 1 and len(lead) == len(queues[1]) == 8
    assert not any(queue._seen for queue in queues)  # a follower need not count collectors for ever
    for rank, (queue, batch) in enumerate(zip(queues, batches, strict=True)):
        queue.begin(batch)
        assert queue._ranks.share == (16, 16, 0)[rank] / 32
