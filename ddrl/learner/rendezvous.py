"""The meeting of the learners of one run, by keys on the server; no gradient passes through it."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ddrl import celery
from ddrl.config import RunConfig
from ddrl.envs.requirements import machine_versions
from ddrl.learner.core import Core
from ddrl.learner.group import follow
from ddrl.learner.publisher import decode_tensors
from ddrl.networks.device import set_up
from ddrl.networks.ranks import ALONE, RankLostError, Ranks
from ddrl.replay.reader import Reader
from ddrl.store import checkpoints, connection, learners, runs
from ddrl.store.checkpoints import Counters
from ddrl.store.connection import Redis, StoreError
from ddrl.store.learners import Group, Member

log = logging.getLogger(__name__)

GATHER_S = 10.0  # for the first group of a run, until its learners are there
AGAIN_S = 1.5  # for a later one: some beats, which a lost learner does not send
STORE_S = 10.0  # to reach the leader
READY_S = 600.0  # to restore a replay
AWAY_S = 300.0  # that a learner is away which does not reach the others
MOST_MISSED = 3  # groups in a row that did not find each other, of which the last learner may be the reason
POLL_S = 0.05
SHOW_S = 5.0  # between two events for Flower
_LOOPBACK = ("127.", "::1")


class AwayError(StoreError):
    """This learner does not reach the others of a run; it tries again after AWAY_S."""


class Peer(contextlib.AbstractContextManager["Peer"]):
    """This learner among those of a run that wants several; a context.

    Once it has been asked to lead or to follow, it announces itself to the others, from a thread of its own.

    Args:
        client: connection to the server.
        run: its id.

    Attributes:
        id: of this learner.
        versions: here, of what must be the same for all learners.
        member: as announced; None: the run wants one learner.
        core: that learns now, or None; its progress is announced. If a follower's makes none, the process ends.
    """

    def __init__(self, client: Redis, run: str) -> None:
        self._client, self._run, self.id = client, run, secrets.token_hex(8)
        self.versions = {"ddrl": machine_versions().get("ddrl", "-"), "torch": torch.__version__}
        self.member: Member | None = None
        self.core: Core | None = None
        self._seen = ""  # number of the group that it followed last
        self._num_missed = 0  # groups in a row
        self._group: Group | None = None  # that it leads, and when it was formed, by the server's clock
        self._formed_s = 0.0
        self._store: Any = None  # where the group meets; None: the leader is alone
        self._before = time.monotonic(), 0, 0.0
        self._num_calls, self._moved_at = 0, 0.0
        self._show_at = self._away_until = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __exit__(self, *_: object) -> None:
        self._store = None
        self._stop.set()
        if self._thread is not None:
            self._thread.join(1.0)  # longer where the server does not answer

    # --- announced ---------------------------------------------------------------------------------------

    def _begin(self, config: RunConfig) -> Member | None:
        """Announce this learner from now on, if the run wants several."""
        if self.member is None and config.learner.num_learners > 1:
            device = set_up(config.learner)
            num_gpus = torch.cuda.device_count()
            if device.type == "cuda" and int(os.environ.get("LOCAL_RANK", "0")) >= num_gpus:
                log.warning("learns on %s beside another learner: GPUs of this machine: %d", device, num_gpus)
            self.member = member = Member(
                host=socket.gethostname(),
                pid=os.getpid(),
                address=_address(self._client.connection_pool),
                device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
                versions=self.versions,
            )
            self._stall_s = config.learner.stall_s
            self._thread = threading.Thread(None, self._announce, "announcer", [member], daemon=True)
            self._thread.start()
        return self.member

    def _announce(self, member: Member) -> None:
        with contextlib.closing(connection.connect()) as client:
            while True:
                self.member = member = self._measured(member, self.core)
                with contextlib.suppress(StoreError, *connection.OUTAGES):
                    if time.monotonic() < self._away_until:
                        learners.leave(client, self._run, self.id)
                    else:
                        learners.announce(client, self._run, self.id, member)
                if time.monotonic() >= self._show_at:
                    self._show_at = time.monotonic() + SHOW_S
                    self._show(member, self.core)
                if self._stop.wait(learners.BEAT_S):
                    break
            with contextlib.suppress(StoreError, *connection.OUTAGES):
                learners.leave(client, self._run, self.id)

    def _show(self, member: Member, core: Core | None) -> None:
        """Let Flower show this learner as a worker: active are its updates a second, processed its updates."""
        num_updates = core.algorithm.num_updates if core else 0
        figures = {"active": round(member.updates_per_s), "processed": num_updates, "freq": SHOW_S}
        fields = {**figures, "sw_ident": "ddrl", "loadavg": os.getloadavg()}
        event = f"{self._run}-rank{member.rank if core else '-'}@{member.host}", "worker-heartbeat"
        threading.Thread(None, celery.show, "show", event, fields, daemon=True).start()

    def _measured(self, member: Member, core: Core | None) -> Member:
        """Return the figures to announce; end the process if a follower hangs, which no thread can end."""
        now = time.monotonic()
        if core is None:
            self._before, self._moved_at = (now, 0, 0.0), now
            return replace(member, rank=-1)
        since, num_before, waited_before = self._before
        num, waited = core.algorithm.num_updates, core.ranks.waited_s
        seconds, self._before = max(now - since, 1e-3), (now, num, waited)
        rate = max(num - num_before, 0) / seconds if num_before else 0.0  # a restored one began with many
        waiting = max(waited - waited_before, 0.0) / seconds
        # The leader is watched by its service thread.
        if core.ranks.num_calls != self._num_calls or core.ranks.rank == 0:
            self._num_calls, self._moved_at = core.ranks.num_calls, now
        elif now - self._moved_at > self._stall_s:
            text = "%s: training hangs for %g s (learner.stall_s); this process ends"
            log.error(text, self._run, self._stall_s)
            os._exit(1)
        return replace(member, rank=core.ranks.rank, updates_per_s=rate, waiting=min(waiting, 1.0))

    # --- the leader's side -------------------------------------------------------------------------------

    def form(self, token: int, config: RunConfig, stop: threading.Event) -> Ranks:
        """Form a group with the learners that are there, as many as the run wants; `complete` comes next.

        After a group that never began only with the others of it: one that dies again and again while it restores the
        run would keep them from learning.

        Args:
            token: of the leader's lease.
            config: the run's.
            stop: ends the waiting.
        """
        before = None if self._group is None or self._group.is_ready else self._group.members
        self._group = self._store = self.core = None
        self._away_until = 0.0
        if (member := self._begin(config)) is None:
            return ALONE
        client, run, wanted = self._client, self._run, config.learner.num_learners
        most = wanted if before is None else len(before)
        group = Group(token=token, number=secrets.token_hex(8), wanted=wanted, members=[self.id])
        since_s = learners.form(client, run, group)
        pointer = checkpoints.newest_pointer(client, run)
        is_first = pointer is None or not pointer["meta"]["updates"]
        deadline = time.monotonic() + (GATHER_S if is_first else AGAIN_S)
        while True:
            found = learners.alive(client, run, since_s=since_s)  # a lost one is not seen again
            found.pop(self.id, None)
            others = [name for name, one in sorted(found.items()) if one.versions == member.versions]
            others = [name for name in others if before is None or name in before]
            if len(others) >= most - 1 or time.monotonic() >= deadline or stop.is_set():
                break
            time.sleep(POLL_S)
        for one in found.values():
            if one.versions != member.versions:
                text = "the learner on %s has other versions: %s, here %s"
                log.warning(text, one.host, one.versions, member.versions)
        others = others[: wanted - 1]
        if len(others) < wanted - 1:
            log.info("%d of %d learners are here; others join later", 1 + len(others), wanted)
        listening = None
        if others:
            own = _offered(member.address, [found[name].address for name in others])
            listening = _listen(config.learner.address, own)
        if listening is not None:
            address, listener = listening
            port = listener.getsockname()[1]
            group = replace(group, members=[self.id, *others], address=address, port=port)
            self._store = TCPStore(address, port, is_master=True, master_listen_fd=listener.detach())
        elif others:  # it would want them for ever
            group = replace(group, wanted=1)
        self._group, self._formed_s = group, learners.form(client, run, group)
        return Ranks(0, len(group.members)) if self._store else ALONE

    def complete(self, core: Core, stop: threading.Event) -> None:
        """Wait until all followers have restored the run, and join them.

        Args:
            core: of the leader.
            stop: ends the waiting.

        Raises:
            RankLostError: one has left, or is not ready in time, or this one does not lead any more.
        """
        self.core, client, run, group = core, self._client, self._run, self._group
        if group is None:
            return
        deadline, others = time.monotonic() + READY_S, {*group.members[1:]}
        while waiting := {name for name in others if not self._is_ready(group.members.index(name))}:
            gone = others - learners.alive(client, run).keys()
            if time.monotonic() > deadline:
                gone |= waiting
            if gone or stop.is_set() or learners.formed(client, run) != group:
                self._group = replace(group, members=[name for name in group.members if name not in gone])
                text = "a learner of the group has left before it was ready"
                raise RankLostError(text if gone else "this learner does not lead it any more, or ends")
            time.sleep(POLL_S)
        self._group = replace(group, is_ready=True)
        if self._store is not None:
            learners.form(client, run, self._group)
            address, timeout_s = group.address, core.config.learner.rank_timeout_s
            core.ranks.join(self._store, address=address, timeout_s=timeout_s, device=core.device)

    def _is_ready(self, rank: int) -> bool:
        return bool(self._store.check([f"ready/{rank}"]))

    def is_wanted(self) -> bool:
        """Return whether a learner of the same versions waits that the group should take in."""
        group = self._group
        if group is None or len(group.members) >= group.wanted:
            return False
        found = learners.alive(self._client, self._run, since_s=self._formed_s).items()
        return any(one.versions == self.versions for name, one in found if name not in group.members)

    # --- the followers' side -----------------------------------------------------------------------------

    def is_left_out(self) -> bool:
        """Return whether a group of as many learners as the run wants learns without this one.

        Raises:
            StoreError: its leader has other versions.
            AwayError: it does not reach the others.
        """
        if time.monotonic() < self._away_until:
            raise AwayError(f"run {self._run}: its learners are not reached; see its journal")
        if (group := learners.formed(self._client, self._run)) is None:
            return False
        leader = learners.alive(self._client, self._run).get(group.members[0])
        if leader is not None and leader.versions != self.versions:
            raise StoreError(
                f"run {self._run}: the leader on {leader.host} has other versions: {leader.versions}, here "
                f"{self.versions}; install the same to join it"
            )
        return self.id not in group.members and len(group.members) >= group.wanted

    def follow(self, stop: threading.Event) -> None:
        """Learn with a group that names this learner, if there is a new one, until it ends.

        Args:
            stop: once set, the leader is asked to end the group.
        """
        client, run, self.core = self._client, self._run, None
        config = runs.config(client, run)
        member, group = self._begin(config), learners.formed(client, run)
        if not member or not group or group.number == self._seen or self.id not in group.members:
            return
        ranks = Ranks(group.members.index(self.id), len(group.members))
        log.info("learns %s as rank %d of %d", run, ranks.rank, ranks.size)
        try:
            self._follow(config, member, group, ranks, stop)
            log.info("the group of %s has ended", run)
        except (RankLostError, StoreError) as error:
            log.warning("%s: %s", run, str(error))
        finally:
            self.core = None
        self._seen = group.number  # not after an outage of the server: the leader may still wait

    def _stay_away(self, text: str) -> None:
        """Say why this learner is not in a group, and be away, or the leader would take it in again."""
        runs.note(self._client, self._run, "learner left out", text)
        self._away_until, self._num_missed = time.monotonic() + AWAY_S, 0

    def _follow(
        self, config: RunConfig, member: Member, group: Group, ranks: Ranks, stop: threading.Event
    ) -> None:
        client, run = self._client, self._run
        try:
            store = TCPStore(group.address, group.port, timeout=timedelta(seconds=STORE_S))
        except RuntimeError:  # as of torch.distributed
            where = f"{group.address}:{group.port}"
            text = f"the leader's {where} cannot be reached from {member.address} on {member.host} in {STORE_S:g} s"
            self._stay_away(text)
            raise RankLostError(text) from None
        with contextlib.ExitStack() as stack:
            reader_client = stack.enter_context(contextlib.closing(connection.connect_blocking()))
            core = Core(reader_client, run, config, ranks)
            connection.bound_replies(reader_client, core.longest)
            stack.callback(ranks.leave)
            stack.callback(core.replay.close)
            cursor, is_shadow = _restore(client, run, core), core.source != core.run
            reader = Reader(reader_client, core.source, cursor, core.decode, keeps_folded=is_shadow)
            reader.start()
            stack.callback(reader.stop)
            try:
                store.set(f"ready/{ranks.rank}", "1")
            except RuntimeError as error:  # of torch.distributed
                raise RankLostError(f"the leader does not begin ({error})") from None
            # Nothing is asked of the store, as that waits for its answer without an end.
            while (now := learners.formed(client, run)) != replace(group, is_ready=True):
                if stop.is_set() or now != group:
                    raise RankLostError("the leader does not begin (it has given this group up)")
                time.sleep(POLL_S)
            address, timeout_s = _on_the_way(group.address, group.port), config.learner.rank_timeout_s
            try:
                ranks.join(store, address=address, timeout_s=timeout_s, device=core.device)
            except RankLostError as error:
                self._num_missed += 1
                if self._num_missed >= MOST_MISSED + ranks.size - 1 - ranks.rank:  # one after the other
                    self._stay_away(f"{error}; any port must be open between {member.host} and the others")
                raise
            self.core, self._num_missed = core, 0
            follow(core, reader, stop)


def _restore(client: Redis, run: str, core: Core) -> bytes:
    """Load what the leader begins with, see `Learner.restore`; return the last entry that it has taken."""
    counters = Counters()
    if (found := checkpoints.load(client, run)) is not None:
        counters = Counters.decode(found[1])
        for _ in core.load(decode_tensors(found[0]), counters, version=counters.version):
            pass
    earlier, _ = runs.rollback(client, run)
    if earlier is None and not counters.updates:
        earlier = runs.initial(client, run)
    if earlier is not None:
        core.algorithm.load_initial_weights(decode_tensors(earlier))
    return counters.cursor.encode()


def _offered(own: str, others: Sequence[str]) -> str:
    """Return this machine's address for learners at other addresses; the loopback is for its own only."""
    far = [address for address in others if not address.startswith(_LOOPBACK)]
    with contextlib.suppress(connection.UnreachableError):
        return _on_the_way(far[0], 1) if far and own.startswith(_LOOPBACK) else own
    return own


def _listen(address: str | None, host: str) -> tuple[str, socket.socket] | None:
    """Return the host and a listening socket of an address, [HOST][:PORT]; of `host` where that names none.

    None: it cannot be used here, or now.
    """
    try:
        parts = urlsplit(f"//{address or ''}")
        host, port = parts.hostname or host, parts.port or 0
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return host, socket.create_server((host, port), family=family)
    except (OSError, ValueError) as error:  # ValueError: no such port
        text = "learner.address: %s cannot be used (%s); this learner learns alone"
        log.warning(text, address or host, error)
        return None


def _address(pool: Any) -> str:
    """Return this machine's address on its way to the server of a pool; loopback where that is a socket."""
    server = pool.connection_kwargs.get("host"), pool.connection_kwargs.get("port")
    host, port = pool.get_master_address() if hasattr(pool, "get_master_address") else server
    return "127.0.0.1" if host is None else _on_the_way(host, port or 6379)


def _on_the_way(host: str, port: int) -> str:
    """Return this machine's address on its way to another; an outage if there is no way, or no such name, now."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise connection.UnreachableError(f"no way to {host}: {error.strerror}") from None
