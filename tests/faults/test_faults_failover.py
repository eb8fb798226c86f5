"""The primary of a server with replicas is lost: another takes over, and what a replica had confirmed is there."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from support.clients import Clients
from support.failover import FAULTS, Failover
from support.fault_fleet import ENDLESS, TRACE
from support.private_server import require_program
from support.processes import Processes, bound
from support.runs import start, target_config

from ddrl.store import connection, ledger, runs

pytestmark = pytest.mark.faults


@pytest.mark.long
def test_failovers_lose_nothing_that_a_replica_has_confirmed(tmp_path: Path) -> None:
    require_program()
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(Failover())
        processes = stack.enter_context(Processes(tmp_path))
        client = stack.enter_context(connection.connect(servers.url))
        processes.worker(servers.url)
        processes.learner(servers.url)
        run = start(client, target_config(**ENDLESS, durability="replica"))
        clients = Clients(servers.url, "replica")
        processes.until(lambda: runs.state(client, run).updates > 0)
        for fault in FAULTS:
            servers.fail_over(fault)
            servers.settle()
            before = runs.state(client, run)

            def goes_on(before: runs.RunState = before) -> bool:
                with contextlib.suppress(*connection.OUTAGES):
                    now = runs.state(client, run)
                    return now.appended_steps > before.appended_steps and now.updates > before.updates
                return False

            processes.until(goes_on, bound(20.0))
            assert clients.lost() == (0, 0), fault
        clients.stop()
        assert clients.lost() == (0, 0) and len(clients.acknowledged.fragments) > 100
        processes.until(lambda: ledger.audit(client, run).is_balanced)
        assert not [process.name for process in processes.started if TRACE in process.text()]
