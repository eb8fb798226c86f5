"""Several learners of one run: they form a group, lose and take in learners, and learn what one would."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import redis
import torch
from support.learners import Run, endless_config, go_back, in_threads, pick_config, playing, until
from support.processes import SLOW_S
from support.ranks import together
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ddrl.algorithms import base
from ddrl.config import ConfigError, validate
from ddrl.learner import core as core_module
from ddrl.learner import rendezvous
from ddrl.learner import run as run_module
from ddrl.learner.core import Core
from ddrl.learner.group import Leading, follow
from ddrl.learner.publisher import decode_tensors
from ddrl.networks.ranks import RankLostError, Ranks, StateLostError
from ddrl.replay.reader import Decoded
from ddrl.store import checkpoints, connection, keys, learners, leases, runs, weights
from ddrl.store.checkpoints import REPLAY
from ddrl.store.connection import StoreError
from ddrl.store.learners import Group, Member
from ddrl.types import Played

TWO = {"num_learners": 2, "checkpoint_every_s": 1.0}
MEMBER = Member(host="elsewhere", pid=1, address="127.0.0.1", device="cpu", versions={})


def ranks_of(run: Run) -> list[int]:
    return [member.rank for member in learners.by_rank(run.client, run.id)]


def goes_on(run: Run, ranks: list[int]) -> None:
    """Wait until these ranks learn."""
    until(lambda: ranks_of(run) == ranks, SLOW_S)
    before = run.state.updates
    until(lambda: run.state.updates > before, SLOW_S)


@pytest.mark.parametrize("on_policy", [False, True])
def test_learners_join_learn_together_leave_and_are_replaced(
    server, learn, log, monkeypatch: pytest.MonkeyPatch, on_policy: bool
) -> None:
    shown: dict[str, Any] = {}  # in Flower
    monkeypatch.setattr(rendezvous.celery, "show", lambda name, event, **fields: shown.update({name: fields}))
    monkeypatch.setattr(rendezvous, "SHOW_S", 0.5)
    config = pick_config(learner=TWO) if on_policy else endless_config(learner=TWO)
    run = Run(server, config)
    with playing(run.url, run.id):
        first = learn(run)
        second = learn(run)
        goes_on(run, [0, 1])
        assert all(member.updates_per_s >= 0.0 for member in learners.by_rank(run.client, run.id))
        ranks = [f"{run.id}-rank{rank}@{socket.gethostname()}" for rank in (0, 1)]
        until(lambda: all(name in shown and shown[name]["processed"] > 0 for name in ranks), SLOW_S)
        second.end()
        goes_on(run, [0])
        learn(run)
        goes_on(run, [0, 1])
        before = run.state.updates
        first.end()  # another one leads
        until(lambda: len(ranks_of(run)) == 1 and run.state.updates > before, SLOW_S)
        learn(run)
        goes_on(run, [0, 1])
    assert first.error is None and second.error is None
    runs.set_status(run.client, run.id, "stopped", "by the test")
    until(lambda: run.state.ended, SLOW_S)
    assert run.audit().is_balanced and not run.dead
    until(lambda: ranks_of(run) == [], SLOW_S)


@pytest.mark.parametrize(("error", "lockstep"), [(StateLostError, False), (RankLostError, True)])
def test_an_update_that_is_in_doubt_is_neither_saved_nor_published(
    server, learn, log, monkeypatch: pytest.MonkeyPatch, error: type[RankLostError], lockstep: bool
) -> None:
    run, real, is_due = (
        Run(server, endless_config(learner=TWO | {"lockstep": lockstep})),
        Core.learn,
        threading.Event(),
    )

    def lose(core: Core, batch: Any) -> dict[str, torch.Tensor]:
        metrics = real(core, batch)
        if is_due.is_set():
            is_due.clear()
            core.algorithm.critic_parameters.vector.data.fill_(77.125)
            core.algorithm.actor_parameters.vector.data.fill_(77.125)
            raise error("a rank has ended")
        return metrics

    monkeypatch.setattr(Core, "learn", lose)
    learn(run)
    with playing(run.url, run.id):
        until(lambda: run.meta and run.meta["updates"] > 0, SLOW_S)
        is_due.set()
        until(lambda: "goes back to the newest checkpoint" in log.text, SLOW_S)
        before = run.state
        until(lambda: run.state.version > before.version + 3 and run.meta["updates"] > before.updates, SLOW_S)
    newest = checkpoints.load(run.client, run.id)
    assert newest is not None
    kept = [weights.get(run.client, run.id, version) for version in run.index.sizes]
    for blob in (newest[0], *filter(None, kept)):  # a version may have been dropped meanwhile
        assert not any(bool((tensor == 77.125).any()) for _, tensor in decode_tensors(blob).items())


def test_what_a_follower_refuses_the_leader_reports(server, learn) -> None:
    run = Run(server, endless_config(learner=TWO))
    run.play(600)
    learn(run), learn(run)
    until(lambda: ranks_of(run) == [0, 1], SLOW_S)
    fields = {b"h": b"no header"}
    for seq in range(4):  # of which each rank decodes two
        run.append(fields, producer=99, seq=seq)
    until(lambda: len(run.dead) == 4, SLOW_S)
    with playing(run.url, run.id):
        goes_on(run, [0, 1])
    assert run.state.dead == 4


def test_changed_settings_reach_the_followers(server, learn, log) -> None:
    run = Run(server, endless_config(learner=TWO))
    with playing(run.url, run.id):
        learn(run), learn(run)
        goes_on(run, [0, 1])
        tree = runs.config(run.client, run.id).model_dump(by_alias=True)
        tree["algorithm"]["learning_rate"] = 1e-5
        runs.change(run.client, run.id, validate(tree), {"algorithm.learning_rate": (1e-3, 1e-5)}, version=0)
        goes_on(run, [0, 1])
    assert "is lost" not in log.text


def test_the_leader_is_reached_at_the_address_that_the_run_names(server, learn, log, monkeypatch) -> None:
    """Again after a loss, though nobody collects what a lost group leaves behind; its replays are gone, too."""
    try:
        taken, host = socket.create_server(("::1", 0), family=socket.AF_INET6), "[::1]"
    except OSError:  # no IPv6 here
        taken, host = socket.create_server(("127.0.0.1", 0)), "127.0.0.1"
    with taken:
        port = taken.getsockname()[1]
    run = Run(server, endless_config(learner={**TWO, "address": f"{host}:{port}"}))
    call, is_due = Ranks._call, threading.Event()
    make, replays = Core.__init__, weakref.WeakSet[Any]()

    def note(core: Core, *arguments: Any) -> None:
        make(core, *arguments)
        replays.add(core.replay)

    def lose(ranks: Ranks, group: Any, *arguments: Any) -> None:
        if is_due.is_set() and ranks.rank == 0:
            is_due.clear()
            raise RankLostError("as if one had ended")
        call(ranks, group, *arguments)

    monkeypatch.setattr(Core, "__init__", note)
    monkeypatch.setattr(Ranks, "_call", lose)
    with playing(run.url, run.id):
        learn(run), learn(run)
        goes_on(run, [0, 1])
        gc.disable()
        try:
            is_due.set()
            until(lambda: "as if one had ended; forms a new group" in log.text, SLOW_S)
            goes_on(run, [0, 1])
            assert len(replays) == 2
        finally:
            gc.enable()
    group = learners.formed(run.client, run.id)
    assert group is not None and (group.address, group.port) == (host.strip("[]"), port)
    assert "cannot be used" not in log.text


def test_a_machine_without_a_way_to_the_server_is_an_outage() -> None:
    with pytest.raises(connection.UnreachableError, match="no way to nowhere.invalid"):
        rendezvous._on_the_way("nowhere.invalid", 7000)


def test_a_leader_whose_address_cannot_be_used_learns_alone(server, learn, log) -> None:
    run = Run(server, endless_config(learner={**TWO, "address": "192.0.2.1:7000"}))
    with playing(run.url, run.id):
        learn(run), learn(run)
        until(lambda: "learner.address: 192.0.2.1:7000 cannot be used" in log.text, SLOW_S)
        goes_on(run, [0, -1])
        time.sleep(1.0)  # it does not go back for the other one, again and again
        group = learners.formed(run.client, run.id)
        time.sleep(2.0)
        assert group is not None and learners.formed(run.client, run.id) == group
    for wrong in ("a b", "host:port", "::1", "x:1:2"):
        with pytest.raises(ConfigError, match="learner.address"):
            endless_config(learner={"address": wrong})
    assert rendezvous._listen("127.0.0.1:99999", "") is None


def test_a_learner_that_serves_all_runs_leaves_one_whose_places_are_taken(server, learn) -> None:
    first = Run(server, endless_config(learner=TWO))
    serving = [learn(first, serves=True) for _ in range(3)]
    until(lambda: ranks_of(first)[:2] == [0, 1], SLOW_S)
    second = Run(server, endless_config())
    until(lambda: second.state.leased, SLOW_S)
    assert ranks_of(first) == [0, 1] and all(one.error is None for one in serving)


# --- ranks that differ, are not reached, or do not fit ------------------------------------------------------


def test_a_rank_with_other_parameters_ends_the_group(server, learn, log, monkeypatch) -> None:
    run, real, is_due = Run(server, endless_config(learner=TWO)), Core.learn, threading.Event()

    def differ(core: Core, batch: Any) -> dict[str, torch.Tensor]:
        if core.ranks.rank == 1 and is_due.is_set():
            is_due.clear()
            core.algorithm.critic_parameters.vector.data[0] += 1e-3
        return real(core, batch)

    monkeypatch.setattr(Core, "learn", differ)
    monkeypatch.setattr(core_module, "CHECK_EVERY", 100)
    with playing(run.url, run.id):
        learn(run), learn(run)
        goes_on(run, [0, 1])
        is_due.set()
        until(lambda: "a rank's parameters differ from the leader's" in log.text, SLOW_S)
        goes_on(run, [0, 1])


@pytest.mark.parametrize("on_policy", [False, True])
def test_all_ranks_go_back_to_a_version(server, learn, log, monkeypatch, on_policy: bool) -> None:
    begun: list[str] = []

    @contextmanager
    def following(config: Any, run: str, token: int, folder: Any) -> Iterator[None]:
        begun.append(run)
        yield

    monkeypatch.setattr(run_module.trackers, "following", following)
    monkeypatch.setattr(core_module, "CHECK_EVERY", 100)
    config = pick_config if on_policy else endless_config
    run = Run(server, config(learner=TWO | {"num_learners": 3}, weights={"keep_every": 1}))
    with playing(run.url, run.id):
        learn(run), learn(run), learn(run)
        goes_on(run, [0, 1, 2])
        until(lambda: run.index.latest >= 4, SLOW_S)
        go_back(run, min(run.index.sizes))
        until(lambda: not run.client.exists(keys.rollback(run.id)), SLOW_S)
        before = run.state.updates
        until(lambda: run.state.updates > before + 300, SLOW_S)
    assert "parameters differ" not in log.text
    assert begun == [run.id], "trackers are told by one learner, without a break"


def test_what_is_reported_of_entries_that_were_taken_or_passed_is_forgotten() -> None:
    """A follower may report entries that have left the stream when the leader comes to them."""
    rounds = ["2-0", "3-0", "9-0", "9-1"], ["5-0", "4-0"], ["8-0"]
    reports = [[[one, "", "", [1, 7, 0, 8], False] for one in entries] for entries in rounds]
    told = iter(reports)

    def exchange(data: bytes) -> list[bytes]:
        report = {"entries": next(told), "total": 0.0, "oldest": "", "leaves": False, "checksum": 0}
        return [data, json.dumps(report).encode()]

    core: Any = SimpleNamespace(
        ranks=SimpleNamespace(size=2, exchange=exchange),
        config=endless_config(),
        checksum=0,
        replay=SimpleNamespace(),
    )
    leading = Leading(core)
    for cursor, left in ((b"2-0", 3), (b"9-0", 3), (b"9-1", 0)):
        leading.tell(cursor)
        assert len(leading._reports) == left


def test_a_follower_admits_what_the_leader_has_admitted_and_nothing_else() -> None:
    """Not what left the stream before the leader came to it: that is not in the ledger."""
    told: list[dict[str, Any]] = [
        {"until": "0-0", "admitted": [], "version": 1},
        {"until": "5-0", "admitted": ["3-0", "5-0"], "version": 1},
        {"until": "9-0", "admitted": [], "version": 1, "ends": True},
    ]
    orders, admitted, paused = iter(told), [], []
    core: Any = SimpleNamespace(
        ranks=SimpleNamespace(rank=1, exchange=lambda data: [json.dumps(next(orders)).encode()]),
        replay=SimpleNamespace(total=0.0, oldest_entry_id=None, pause=lambda: paused.append(1)),
        checksum=0,
        admit=lambda entry, version: admitted.append(entry.entry_id),
    )
    read = iter([[Decoded(b"%d-0" % number, 0, 7, 1, number, 0, rank=1) for number in range(2, 8)]])
    reader: Any = SimpleNamespace(take=lambda for_s: next(read, []))
    follow(core, reader, threading.Event())
    assert admitted == [b"3-0", b"5-0"] and len(paused) == 3


def test_until_the_ranks_have_sent_their_priorities_those_of_the_checkpoint_are_kept() -> None:
    """Of an entry of this rank those that it has learned since."""

    def state(entry: int, priority: float) -> dict[str, torch.Tensor]:
        columns = {
            "entry": torch.tensor([[entry, 0]]),
            "items": torch.tensor([1]),
            "next": torch.tensor(entry),
        }
        columns |= {"priority": torch.tensor([priority]), "largest": torch.tensor(priority)}
        return {REPLAY + name: value for name, value in columns.items()}

    core: Any = SimpleNamespace(
        ranks=SimpleNamespace(size=2), config=endless_config(), replay_state=lambda: state(8, 0.5)
    )
    leading = Leading(core)
    leading.states = [state(7, 2.0), state(8, 1.0)]
    found = {name.removeprefix(REPLAY): value.tolist() for name, value in leading.replay_state().items()}
    assert found.pop("entry") == [[7, 0], [8, 0]]
    assert found == {"items": [1, 1], "priority": [2.0, 0.5], "largest": 2.0, "next": 8}


def test_an_entry_that_its_rank_never_reports_ends_the_group() -> None:
    """As after XADD with MAXLEN, when only the leader has read it."""
    told = {"entries": [["3-0", "", "", [1, 7, 0, 8], False]], "total": 0.0, "oldest": "", "leaves": False}
    ranks = SimpleNamespace(
        size=2, exchange=lambda data: [data, json.dumps({**told, "checksum": 0}).encode()]
    )
    config = SimpleNamespace(learner=SimpleNamespace(rank_timeout_s=0.1))
    core: Any = SimpleNamespace(ranks=ranks, config=config, checksum=0, replay=SimpleNamespace())
    leading = Leading(core)
    entries = [Decoded(b"%d-0" % number, 0, 7, 1, number, 0, rank=1) for number in (3, 4)]
    assert [leading.report(entry) for entry in entries] == [None] * 2
    time.sleep(0.15)
    leading.tell(b"2-0")
    assert leading.report(entries[0]) == {
        "reason": "",
        "head": b"",
        "played": Played(1, 7, 0, 8),
        "left_out": False,
    }
    assert leading.report(replace(entries[1], rank=0)) == {} and leading.report(entries[1]) is None
    time.sleep(0.15)
    leading.tell(b"2-0", chosen={})
    assert leading.report(entries[1]) is None, "nobody was asked since, as during a long update"
    leading.tell(b"2-0")
    with pytest.raises(RankLostError, match="rank 1 does not report entry 4-0"):
        leading.report(entries[1])


def test_a_rank_that_ends_is_noticed_at_once_and_one_that_hangs_in_time() -> None:
    hold = threading.Event()

    def meet(ranks: Ranks) -> str:
        ranks.exchange(b"hello")
        if ranks.rank:
            hold.wait(20.0)
            return ""
        try:
            ranks.exchange(b"again")
        except RankLostError as error:
            return str(error)
        finally:
            hold.set()
        return "no error"

    assert "Timed out" in together(2, meet, timeout_s=1.0)[0]


def test_a_leader_takes_no_learner_of_other_versions_and_waits_no_longer_for_one_that_is_gone(
    run, log, monkeypatch
) -> None:
    config = endless_config(learner=TWO)
    token = leases.acquire(run.client, run.id, host="here", folder="/tmp")
    assert token is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(connection.URL_VARIABLE, run.url)
        patch.setattr(rendezvous, "GATHER_S", 1.0)
        with rendezvous.Peer(run.client, run.id) as peer:

            def formed(name: str, versions: dict[str, str]) -> Ranks:
                """Form a group while another learner beats."""
                stop = threading.Event()

                def beat() -> None:
                    while not stop.wait(0.1):
                        learners.announce(run.client, run.id, name, replace(MEMBER, versions=versions))

                with in_threads(beat, stop=stop.set):
                    return peer.form(token, config, threading.Event())

            peer.core = SimpleNamespace()  # type: ignore[assignment]
            assert formed("other", {"ddrl": "0.0.1"}).size == 1
            assert peer.core is None, "no two replays at a time"
            assert "has other versions: {'ddrl': '0.0.1'}" in log.text
            assert not peer.is_wanted()
            alone: Any = SimpleNamespace(ranks=Ranks(), algorithm=SimpleNamespace(num_updates=0))
            peer.complete(alone, threading.Event())
            assert peer.member is not None
            own = peer.member.versions
            learners.announce(run.client, run.id, "gone", replace(MEMBER, versions=own))
            assert peer.is_wanted()
            ranks = formed("gone", own)
            assert ranks.size == 2 and not peer.is_wanted()
            learners.leave(run.client, run.id, "gone")
            core: Any = SimpleNamespace(ranks=ranks, algorithm=SimpleNamespace(num_updates=0))
            with pytest.raises(RankLostError, match="left before it was ready"):
                peer.complete(core, threading.Event())
            assert formed("again", own).size == 1, "one that may die again comes later"
            learners.announce(run.client, run.id, "again", replace(MEMBER, versions=own))
            peer.complete(alone, threading.Event())
            assert peer.is_wanted() and formed("again", own).size == 2
            monkeypatch.setattr(learners, "TTL_S", 600.0)
            leases.release(run.client, run.id, token)  # another one leads
            with pytest.raises(RankLostError, match="does not lead it any more"):
                peer.complete(core, threading.Event())


def test_a_leader_that_is_not_reached_is_named(server, log, monkeypatch) -> None:
    run = Run(server, endless_config(learner=TWO))
    monkeypatch.setenv(connection.URL_VARIABLE, run.url)
    monkeypatch.setattr(rendezvous, "STORE_S", 1.0)
    token = leases.acquire(run.client, run.id, host="here", folder="/tmp", ttl_ms=60_000)
    assert token is not None
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with rendezvous.Peer(run.client, run.id) as peer:
        group = Group(
            token=token, number="1", wanted=2, members=["leader", peer.id], address="127.0.0.1", port=port
        )
        for number in ("1", "1", "2"):  # the second time it is known
            learners.form(run.client, run.id, replace(group, number=number))
            peer.follow(threading.Event())
            assert rendezvous.AWAY_S - 20 < peer._away_until - time.monotonic() <= rendezvous.AWAY_S
        with pytest.raises(rendezvous.AwayError):  # `serve` learns other runs meanwhile
            peer.is_left_out()
        text = (
            f"the leader's 127.0.0.1:{port} cannot be reached from 127.0.0.1 on {socket.gethostname()} in 1 s"
        )
        assert log.text.count(text) == 2
        assert "learner left out" in run.journal
        until(
            lambda: peer.id not in learners.alive(run.client, run.id)
        )  # so that the leader goes on without it


def test_learners_that_do_not_find_each_other_part(server, monkeypatch) -> None:
    """They reach the leader's store, but not each other: as behind a firewall with one open port."""
    run = Run(server, endless_config(learner=TWO))
    monkeypatch.setenv(connection.URL_VARIABLE, run.url)
    monkeypatch.setattr(rendezvous, "_restore", lambda *_: b"0-0")

    def join(*_: Any, **__: Any) -> None:
        raise RankLostError("the learners do not find each other")

    monkeypatch.setattr(Ranks, "join", join)
    token = leases.acquire(run.client, run.id, host="here", folder="/tmp", ttl_ms=600_000)
    assert token is not None
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with rendezvous.Peer(run.client, run.id) as peer:
        place: dict[str, Any] = {"address": "127.0.0.1", "port": store.port}
        members = ["leader", peer.id]
        group = Group(token=token, number="", wanted=2, members=members, is_ready=True, **place)
        for number in range(3):
            assert not peer.is_left_out() and "learner left out" not in run.journal
            learners.form(run.client, run.id, replace(group, number=str(number)))
            peer.follow(threading.Event())
        assert "learner left out" in run.journal
        with pytest.raises(rendezvous.AwayError):
            peer.is_left_out()


def test_the_loopback_is_for_learners_of_the_same_machine_only(monkeypatch) -> None:
    monkeypatch.setattr(rendezvous, "_on_the_way", lambda host, _: f"to {host}")
    assert rendezvous._offered("127.0.0.1", ["127.0.0.1", "::1"]) == "127.0.0.1"
    assert rendezvous._offered("10.0.0.1", ["10.0.0.2"]) == "10.0.0.1"
    assert rendezvous._offered("127.0.0.1", ["127.0.0.1", "192.0.2.1"]) == "to 192.0.2.1"
    monkeypatch.undo()
    assert rendezvous._offered("127.0.0.1", ["nowhere.invalid"]) == "127.0.0.1"  # no way there


def test_a_learner_of_other_versions_than_the_leaders_does_not_stay(server, learn, log, monkeypatch) -> None:
    run = Run(server, endless_config(learner=TWO))
    token = leases.acquire(run.client, run.id, host="here", folder="/tmp", ttl_ms=600_000)
    assert token is not None
    learners.form(run.client, run.id, Group(token=token, number="1", wanted=2, members=["leader"]))
    monkeypatch.setattr(learners, "TTL_S", 600.0)
    learners.announce(run.client, run.id, "leader", replace(MEMBER, versions={"ddrl": "0.0.1"}))
    learn(run, serves=True)
    until(
        lambda: "the leader on elsewhere has other versions: {'ddrl': '0.0.1'}, here {'ddrl'" in log.text,
        SLOW_S,
    )
    until(lambda: learners.alive(run.client, run.id).keys() <= {"leader"}, SLOW_S)


def test_an_outage_while_a_follower_restores_does_not_keep_it_from_the_group(server, monkeypatch) -> None:
    monkeypatch.setenv(connection.URL_VARIABLE, server.url)
    run, tried = Run(server, endless_config(learner=TWO)), []

    def restore(*_: Any) -> bytes:
        tried.append(1)
        raise redis.ConnectionError("lost") if len(tried) == 1 else StoreError("enough")

    monkeypatch.setattr(rendezvous, "_restore", restore)
    token = leases.acquire(run.client, run.id, host="here", folder="/tmp", ttl_ms=600_000)
    assert token is not None
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with rendezvous.Peer(run.client, run.id) as peer:
        members, place = ["leader", peer.id], {"address": "127.0.0.1", "port": store.port}
        learners.form(run.client, run.id, Group(token=token, number="1", wanted=2, members=members, **place))
        with pytest.raises(redis.ConnectionError):
            peer.follow(threading.Event())
        for _ in range(2):
            peer.follow(threading.Event())
        assert len(tried) == 2


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_follower_leaves_a_group_whose_leader_is_lost_before_it_begins(
    server, monkeypatch, is_asked
) -> None:
    """Its lease has expired, or this process is asked to end."""
    monkeypatch.setenv(connection.URL_VARIABLE, server.url)
    run, stop = Run(server, endless_config(learner=TWO)), threading.Event()
    token = leases.acquire(run.client, run.id, host="here", folder="/tmp", ttl_ms=600_000)
    assert token is not None
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with rendezvous.Peer(run.client, run.id) as peer:
        members = ["leader", peer.id]
        group = Group(
            token=token, number="1", wanted=2, members=members, address="127.0.0.1", port=store.port
        )
        learners.form(run.client, run.id, group)
        assert not peer.is_left_out()

        def end() -> None:
            until(lambda: store.check(["ready/1"]), SLOW_S)
            stop.set() if is_asked else leases.release(run.client, run.id, token)

        with in_threads(end, stop=lambda: None):
            peer.follow(stop)  # returns
        assert peer.core is None
        if is_asked:
            return
        # It leads now, and does not wait for the leader, which was there a moment ago.
        learners.announce(run.client, run.id, "leader", replace(MEMBER, versions=peer.versions))
        time.sleep(0.01)
        monkeypatch.setattr(rendezvous, "GATHER_S", 1.0)
        token = leases.acquire(run.client, run.id, host="here", folder="/tmp", ttl_ms=600_000)
        assert peer.form(token, runs.config(run.client, run.id), threading.Event()).size == 1


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            {"name": "sac", "batch_norm": True},
            "learner.num_learners: 2, but sac as it is configured learns alone",
        ),
        (
            {"name": "docs.own_algorithm"},
            "learner.num_learners: 2, but docs.own_algorithm as it is configured",
        ),
    ],
)
def test_an_algorithm_that_needs_whole_batches_learns_alone(
    run, monkeypatch, algorithm: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "docs")
    spaces = runs.spaces(run.client, run.id)
    config = endless_config(learner=TWO).model_copy(update={"algorithm": algorithm})
    if algorithm["name"] != "sac":
        spaces = replace(
            spaces, action_kind="discrete", action_shape=(), action_sizes=(4,), action_low=(), action_high=()
        )
    with pytest.raises(ConfigError, match=message):
        base.resolve(config, spaces)
