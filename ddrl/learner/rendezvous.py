"""The meeting of the learners of one run, by keys on the server; no gradient passes through it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ddrl import celery
from ddrl.algorithms import base
from ddrl.config import RunConfig, validate
from ddrl.envs.requirements import machine_versions
from ddrl.learner.core import Core
from ddrl.learner.group import follow
from ddrl.learner.publisher import decode_tensors
from ddrl.networks.device import choose_device
from ddrl.networks.ranks import RankLostError, Ranks
from ddrl.replay.reader import Reader
from ddrl.store import checkpoints, connection, learners, runs
from ddrl.store.checkpoints import Counters
from ddrl.store.connection import Redis, RunGoneError, StoreError
from ddrl.store.learners import Group, Member

log = logging.getLogger(__name__)

GATHER_S = 10.0  # for the first group of a run, until its learners are there
AGAIN_S = 1.5  # for a later one: some beats, which a lost learner does not send
STORE_S = 10.0  # to reach the leader
READY_S = 600.0  # to restore a replay
POLL_S = 0.05
SHOW_S = 5.0  # between two events for Flower


class Announcer:
    """Announces this learner to the others of its run, from a thread of its own; a context.

    Args:
        client: connection to the server, asked for this machine's address.
        run: its id.
        config: the run's.

    Attributes:
        id: of this learner.
        core: that learns now, or None; its progress is announced. If a follower's makes none, the process ends.
    """

    def __init__(self, client: Redis, run: str, config: RunConfig) -> None:
        self.id = secrets.token_hex(8)
        self.core: Core | None = None
        self._run, self._stall_s = run, config.learner.stall_s
        versions = {"ddrl": machine_versions().get("ddrl", "-"), "torch": torch.__version__}
        device = choose_device(config.learner.device)
        self.member = Member(
            host=socket.gethostname(),
            pid=os.getpid(),
            address=_address(client),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            versions=versions,
        )
        self._before = time.monotonic(), 0, 0.0
        self._num_calls, self._moved_at = 0, 0.0
        self._show_at = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._announce, name="announcer", daemon=True)

    def __enter__(self) -> Announcer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(1.0)  # longer where the server does not answer

    def _announce(self) -> None:
        with contextlib.closing(connection.connect()) as client:
            while True:
                self._measure(self.core)
                with contextlib.suppress(StoreError, *connection.OUTAGES):
                    learners.announce(client, self._run, self.id, self.member)
                if time.monotonic() >= self._show_at:
                    self._show_at = time.monotonic() + SHOW_S
                    self._show(self.core)
                if self._stop.wait(learners.BEAT_S):
                    break
            with contextlib.suppress(StoreError, *connection.OUTAGES):
                learners.leave(client, self._run, self.id)

    def _show(self, core: Core | None) -> None:
        """Let Flower show this learner as a worker: active are its updates a second, processed its updates."""
        member = self.member
        num_updates = core.algorithm.num_updates if core else 0
        figures = {"active": round(member.updates_per_s), "processed": num_updates}
        name = f"{self._run}-rank{member.rank if core else '-'}@{member.host}"
        # In a thread, as a connection that is lost without notice delays it by its timeout.
        show = partial(celery.show_learner, name, SHOW_S, **figures)
        threading.Thread(target=show, name="show", daemon=True).start()

    def _measure(self, core: Core | None) -> None:
        """Set the figures to announce; end the process if a follower hangs, which no thread can end."""
        now = time.monotonic()
        if core is None:
            self.member, self._before = replace(self.member, rank=-1), (now, 0, 0.0)
            self._moved_at = now
            return
        since, num_before, waited_before = self._before
        num, waited = core.algorithm.num_updates, core.ranks.waited_s
        seconds, self._before = max(now - since, 1e-3), (now, num, waited)
        rate, waiting = max(num - num_before, 0) / seconds, max(waited - waited_before, 0.0) / seconds
        self.member = replace(
            self.member, rank=core.ranks.rank, updates_per_s=rate, waiting=min(waiting, 1.0)
        )
        # The leader is watched by its service thread.
        if core.ranks.num_calls != self._num_calls or core.ranks.rank == 0:
            self._num_calls, self._moved_at = core.ranks.num_calls, now
        elif now - self._moved_at > self._stall_s:
            log.error(
                "%s: training hangs for %g s (learner.stall_s); this process ends", self._run, self._stall_s
            )
            os._exit(1)


# --- the leader's side -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Formation:
    """A group that comes together.

    Attributes:
        ranks: not joined yet.
        group: as the followers see it.
        formed_s: when, by the server's clock.
        store: where they meet; None: the leader is alone.
    """

    ranks: Ranks
    group: Group
    formed_s: float
    store: Any = None

    def wants(self, client: Redis, run: str, versions: Mapping[str, str]) -> bool:
        """Return whether a learner of the same versions waits, and has a place."""
        if len(self.group.members) >= self.group.wanted:
            return False
        found = learners.alive(client, run, since_s=self.formed_s)
        return any(one.versions == versions for name, one in found.items() if name not in self.group.members)

    def complete(self, client: Redis, run: str, config: RunConfig, stop: threading.Event) -> None:
        """Wait until all followers have restored the run, and join them.

        Raises:
            RankLostError: one has ended, or is not ready in time.
        """
        if self.store is None:
            return
        deadline, names = time.monotonic() + READY_S, [f"ready/{rank}" for rank in range(1, self.ranks.size)]
        while not self.store.check(names):
            gone = {*self.group.members[1:]} - learners.alive(client, run).keys()
            if gone or stop.is_set() or time.monotonic() > deadline:
                raise RankLostError("a learner of the group has ended before it was ready")
            time.sleep(POLL_S)
        self.store.set("go", "1")
        self.ranks.join(self.store, address=self.group.address, timeout_s=config.learner.rank_timeout_s)


def form(
    client: Redis,
    run: str,
    token: int,
    config: RunConfig,
    announcer: Announcer,
    stop: threading.Event,
    *,
    is_lost: bool = False,
) -> Formation:
    """Form a group with the learners that are there, as many as the run wants.

    Args:
        client: connection to the server.
        run: its id.
        token: of the leader's lease.
        config: the run's.
        announcer: the leader's.
        stop: ends the waiting.
        is_lost: a learner was lost, so those count that were seen since.

    Raises:
        StoreError: other learners cannot be served at `learner.address`.
    """
    wanted, member = config.learner.num_learners, announcer.member
    group = Group(token=token, number=secrets.token_hex(8), wanted=wanted, members=[announcer.id])
    since_s = learners.form(client, run, group)
    is_first = checkpoints.newest_pointer(client, run) is None
    deadline = time.monotonic() + (GATHER_S if is_first else AGAIN_S)
    while True:
        found = learners.alive(client, run, since_s=since_s if is_lost else 0.0)
        found.pop(announcer.id, None)
        others = [name for name, one in sorted(found.items()) if one.versions == member.versions]
        if len(others) >= wanted - 1 or time.monotonic() >= deadline or stop.is_set():
            break
        time.sleep(POLL_S)
    for name in found.keys() - {*others}:
        one = found[name]
        log.warning(
            "the learner on %s has other versions: %s, here %s", one.host, one.versions, member.versions
        )
    others = others[: wanted - 1]
    if len(others) < wanted - 1:
        log.info("%d of %d learners are here; others join later", 1 + len(others), wanted)
    if not others:
        return Formation(Ranks(), group, learners.form(client, run, group))
    host, _, port = (config.learner.address or member.address).partition(":")
    try:
        listener = socket.create_server((host, int(port or 0)))
    except OSError as error:
        where = f"learner.address: {host}:{port or 0}"
        raise StoreError(f"{where} cannot be used ({os.strerror(error.errno or 0)}); name another") from None
    number = listener.getsockname()[1]
    store = TCPStore(
        host,
        number,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=timedelta(seconds=READY_S),
    )
    group = replace(group, members=[announcer.id, *others], address=host, port=number)
    return Formation(Ranks(0, 1 + len(others)), group, learners.form(client, run, group), store)


# --- the followers' side ---------------------------------------------------------------------------------


def join(client: Redis, run: str, announcer: Announcer, seen: set[str], stop: threading.Event) -> None:
    """Learn with a group that names this learner, if there is a new one, until it ends.

    Args:
        client: connection to the server.
        run: its id.
        announcer: of this learner.
        seen: numbers of groups that it has been in.
        stop: once set, the leader is asked to end the group.
    """
    group = learners.formed(client, run)
    if group is None or group.number in seen or announcer.id not in group.members:
        return
    seen.add(group.number)
    rank = group.members.index(announcer.id)
    log.info("learns %s as rank %d of %d", run, rank, len(group.members))
    try:
        _follow(client, run, announcer, Ranks(rank, len(group.members)), group, stop)
        log.info("the group of %s has ended", run)
    except (RankLostError, RunGoneError, runs.UnknownRunError) as error:
        log.warning("%s: %s", run, error)
    finally:
        announcer.core = None


def _follow(
    client: Redis, run: str, announcer: Announcer, ranks: Ranks, group: Group, stop: threading.Event
) -> None:
    config, spaces = runs.config(client, run), runs.spaces(client, run)
    try:
        store = TCPStore(group.address, group.port, timeout=timedelta(seconds=STORE_S))
    except RuntimeError:  # as of torch.distributed
        where = f"{group.address}:{group.port}"
        raise RankLostError(
            f"the leader's {where} cannot be reached from {announcer.member.address}"
        ) from None
    torch.set_num_threads(config.learner.num_threads)
    device = choose_device(config.learner.device)
    with contextlib.ExitStack() as stack:
        reader_client = stack.enter_context(contextlib.closing(connection.connect_blocking()))
        core = Core(reader_client, run, config, base.resolve(config, spaces), device=device, ranks=ranks)
        stack.callback(ranks.leave)
        stack.callback(core.replay.close)
        cursor = _restore(client, run, core)
        reader = Reader(reader_client, run, cursor, core.decode)
        reader.start()
        stack.callback(reader.stop)

        def apply(settings: str) -> None:
            core.apply_options(base.resolve(validate(json.loads(settings)), spaces).config)

        try:
            store.set(f"ready/{ranks.rank}", "1")
            store.wait(["go"], timedelta(seconds=READY_S))
        except RuntimeError as error:
            raise RankLostError(f"the leader does not begin ({error})") from None
        ranks.join(store, address=announcer.member.address, timeout_s=config.learner.rank_timeout_s)
        announcer.core = core
        follow(core, reader, stop, apply)


def _restore(client: Redis, run: str, core: Core) -> bytes:
    """Load what the leader begins with; return the last entry that it has taken."""
    core.algorithm.from_policy = bool(runs.state(client, run).warm)
    if (found := checkpoints.load(client, run)) is not None:
        counters = Counters.decode(found[1])
        for _ in core.load(decode_tensors(found[0]), counters, version=counters.version):
            pass
        return counters.cursor.encode()
    if (initial := runs.initial(client, run)) is not None:
        core.algorithm.load_initial_weights(decode_tensors(initial))
    return b"0-0"


def _address(client: Redis) -> str:
    """Return this machine's address on its way to the server; loopback where that is a socket."""
    options = client.connection_pool.connection_kwargs
    pool: Any = client.connection_pool
    server = pool.get_master_address() if hasattr(pool, "get_master_address") else None
    host, port = server or (options.get("host"), options.get("port"))
    if host is None:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port or 6379)))  # sends nothing
        return str(probe.getsockname()[0])
