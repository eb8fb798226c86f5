"""Metrics for Prometheus of a real learner and a real worker, and the dashboard that shows them."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.private_server import free_port
from support.processes import Processes

from ddrl.runs import monitoring
from ddrl.store import runs

WORKERS = Path(__file__).parents[2] / "workers"
DASHBOARD = json.loads((WORKERS / "grafana" / "ddrl.json").read_text("utf-8"))


def scrape(port: int) -> dict[str, dict[tuple[str, ...], float]]:
    """Return metric -> label values, sorted by the labels' names -> value; empty if nothing is served."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
            text = reply.read().decode()
    except OSError:
        return {}
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sample.labels[name] for name in sorted(sample.labels))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def shown(dashboard: dict[str, Any]) -> set[str]:
    """Return the metrics named in a dashboard's expressions."""
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries = [variable["query"] for variable in dashboard["templating"]["list"]]
    return set(re.findall(r"\b(?:ddrl|process)_[a-z_]+", " ".join(targets + queries)))


def test_processes_serve_what_the_dashboard_shows(server, processes: Processes, monkeypatch, caplog) -> None:
    learners, workers = free_port(), free_port()
    run = processes.detach(server.url, stop={"return": None, "time": 600})
    env = {monitoring.VARIABLE: f"127.0.0.1:{learners}"}
    learner = processes.learner(server.url, run, env=env)
    worker = processes.worker(server.url, "--role", "all", env={monitoring.VARIABLE: str(workers)})
    label = (run,)
    processes.until(lambda: scrape(learners).get("ddrl_evaluation_return_mean"))
    processes.until(lambda: scrape(learners).get("ddrl_staleness_versions"))
    learned, worked = scrape(learners), scrape(workers)
    now = runs.state(server.client, run)
    assert 0 < learned["ddrl_env_steps_total"][label] <= now.appended_steps
    assert 0 < learned["ddrl_updates_total"][label] <= now.updates
    assert learned["ddrl_leased"][label] == learned["ddrl_server_up"][()] == 1
    assert learned["ddrl_status"] == {(run, "active"): 1.0}
    assert learned["ddrl_stream_budget_bytes"][label] >= learned["ddrl_stream_bytes"][label] > 0
    assert ("critic_loss", run) in learned["ddrl_learner_figure"]
    assert learned["process_resident_memory_bytes"][()] > 1e7
    node = next(iter(worked["ddrl_worker_processes"]))
    assert worked["ddrl_worker_processes"][node] == 1 >= worked["ddrl_worker_busy_processes"][node]
    assert worked["ddrl_worker_tasks_total"][(*node, "ddrl.rollout")] > 0
    assert worked["ddrl_worker_resident_bytes"][node] > 1e7 and worked["ddrl_worker_uptime_seconds"][node] > 0

    exported = set(learned) | set(worked)
    assert len(shown(DASHBOARD)) > 30 and shown(DASHBOARD) - exported == set()
    assert set(monitoring.SERIES) <= set(learned)
    assert {name for name, _ in monitoring.ROW.values()} <= set(learned)
    assert not re.search(r"warning|WARNING", learner.text().split("metrics for Prometheus")[0])

    # Another process on the same port logs one line, and continues.
    monkeypatch.setenv(monitoring.VARIABLE, str(workers))
    monitoring.serve(monitoring.WorkerMetrics("another", tuple, busy=int, tasks=dict))
    line = f"{monitoring.VARIABLE}={workers}: Address already in use; no metrics are served"
    assert caplog.messages == [line]

    # A server that is down is one metric.
    server.kill()
    processes.until(lambda: scrape(learners).get("ddrl_server_up", {}).get(()) == 0)
    assert "ddrl_env_steps_total" not in scrape(learners)
    for process in (learner, worker):  # else they wait for it
        process.kill_group()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9464", ("127.0.0.1", 9464)),
        (":9464", ("127.0.0.1", 9464)),
        ("0.0.0.0:9464", ("0.0.0.0", 9464)),
        ("[::1]:80", ("::1", 80)),
        (" host.example:65535 ", ("host.example", 65535)),
    ],
)
def test_an_address_is_read(text: str, expected: tuple[str, int]) -> None:
    assert monitoring.address(text) == expected


@pytest.mark.parametrize(
    "text", ["0", "127.0.0.1:0", "65536", "host", "host:", "::1:80", "http://h:80", "-1", ""]
)
def test_an_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected HOST:PORT with a port from 1 to 65535"):
        monitoring.address(text)


def test_without_a_usable_address_nothing_is_served(monkeypatch, caplog) -> None:
    monkeypatch.delenv(monitoring.VARIABLE, raising=False)
    monitoring.serve(monitoring.LearnerMetrics())
    assert caplog.text == ""
    monkeypatch.setenv(monitoring.VARIABLE, "127.0.0.1:0")
    monitoring.serve(monitoring.LearnerMetrics())
    assert caplog.text.count("\n") == 1 and "DDRL_METRICS=127.0.0.1:0: expected HOST:PORT" in caplog.text


def test_a_process_that_has_ended_has_no_memory() -> None:
    assert monitoring.resident_bytes(2**22 + 1) == 0


def test_the_dashboard_has_no_overlaps_and_known_sources() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    sources = yaml.safe_load((WORKERS / "grafana" / "datasource.yml").read_text("utf-8"))["datasources"]
    uids = {panel["datasource"]["uid"] for panel in DASHBOARD["panels"] if "datasource" in panel}
    assert uids == {sources[0]["uid"]}
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        covered = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not covered & cells and max(x for x, _ in covered) < 24, panel["title"]
        cells |= covered
    scraped = yaml.safe_load((WORKERS / "prometheus.yml").read_text("utf-8"))["scrape_configs"]
    jobs = {job["job_name"] for job in scraped}
    named = set(re.findall(r'job="([^"]+)"', json.dumps(DASHBOARD).replace("\\", "")))
    assert named <= jobs == {"ddrl-learner", "ddrl-worker"}
