"""Two machines, as network namespaces with a cable between them: one has the server, the other players; both learn."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.processes import Process, Processes, bound

from ddrl.store import connection, learners, ledger, runs, workers
from ddrl.store.server import server_binary

PASSWORD = "of-the-two-hosts"


@dataclass(frozen=True)
class Host:
    """A machine: a network namespace with one cable.

    Attributes:
        name: of the namespace, and what its processes believe that the machine is called.
        address: its own on the cable.
        cable: its end of it.
    """

    name: str
    address: str
    cable: str

    def command(self, *words: str) -> list[str]:
        """A command line that runs `words` there."""
        rename = 'hostname "$0" && exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-ec", rename, self.name, *words]

    def link(self, state: str) -> None:
        """Plug the cable in (`up`) or pull it (`down`)."""
        ip("-n", self.name, "link", "set", self.cable, state)


def ip(*arguments: str) -> str:
    """Return the output of iproute2; OSError if it fails."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two machines; both are gone afterwards."""
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}: install iproute2 and util-linux")
    if os.geteuid() != 0:
        pytest.skip("needs root to make network namespaces")
    tag = secrets.token_hex(3)
    one = Host(f"ddrl-{tag}-a", "198.51.100.1", f"d{tag}a")
    two = Host(f"ddrl-{tag}-b", "198.51.100.2", f"d{tag}b")
    try:
        try:
            ip("netns", "add", one.name)
            ip("netns", "add", two.name)
            cable = f"{one.cable} netns {one.name} type veth peer name {two.cable} netns {two.name}"
            ip("link", "add", *cable.split())
            for host in (one, two):
                ip("-n", host.name, "addr", "add", f"{host.address}/30", "dev", host.cable)
                ip("-n", host.name, "link", "set", "lo", "up")
                host.link("up")
        except OSError as error:
            pytest.skip(f"network namespaces are not allowed here ({error})")
        yield one, two
    finally:
        for host in (one, two):
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)
        assert tag not in ip("netns", "list")


@pytest.fixture
def folder(hosts: tuple[Host, Host]) -> Iterator[Path]:
    """The server's: a short path, as the test looks in through a unix socket."""
    folder = Path("/tmp") / hosts[0].name
    folder.mkdir(mode=0o700)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.long
def test_a_run_on_two_hosts_outlives_a_pulled_cable(
    hosts: tuple[Host, Host], folder: Path, processes: Processes
) -> None:
    here, there = hosts
    learner = {"num_learners": 2, "rank_timeout_s": 2, "checkpoint_every_s": 1}
    url, ddrl = f"redis://:{PASSWORD}@{here.address}:6379/0", (sys.executable, "-m", "ddrl")

    def start(host: Host, name: str, *words: str) -> Process:
        log, environment = processes.folder / f"{name}.log", processes.environment(url)
        processes.started.append(Process(name, host.command(*words), processes.folder, environment, log))
        return processes.started[-1]

    options = ["--bind", here.address, "--port", "6379", "--requirepass", PASSWORD]
    private = ["--unixsocket", str(folder / "s"), "--dir", str(folder), "--save", ""]
    start(here, "server", server_binary(), *options, *private)
    with connection.connect(f"unix://:{PASSWORD}@{folder}/s") as client:
        processes.until((folder / "s").exists)
        path = processes.config(stop={"return": None, "time": 600}, learner=learner)
        assert start(here, "submit", *ddrl, "submit", str(path), "--detach").wait() == 0, processes.logs()
        run = runs.resolve(client, "last")

        def learning() -> list[str]:
            return [one.host for one in learners.by_rank(client, run) if one.rank >= 0]

        start(here, "learner", *ddrl, "learner", run)
        processes.until(lambda: runs.state(client, run).leased)
        start(there, "learner there", *ddrl, "learner", run)
        start(there, "worker", *ddrl, "worker", "--role", "all", "-c", "1")
        processes.until(lambda: learning() == [here.name, there.name])
        updates = runs.state(client, run).updates
        processes.until(lambda: runs.state(client, run).updates > updates + 100)
        assert [worker.host for worker in workers.alive(client)] == [there.name]
        there.link("down")
        processes.until(lambda: learning() == [here.name], bound(15.0))
        before = runs.state(client, run)
        assert before.leased and before.host == here.name  # its learner does not need the other host
        there.link("up")
        more = before.appended_steps + 500
        processes.until(lambda: runs.state(client, run).appended_steps > more, bound(15.0))
        processes.until(lambda: learning() == [here.name, there.name])
        assert runs.set_status(client, run, "stopped", "by the test")
        processes.until(lambda: not runs.state(client, run).leased)
        audit = ledger.audit(client, run)
        assert audit.is_balanced and audit.total("appended") > 0 == audit.total("trimmed"), audit
