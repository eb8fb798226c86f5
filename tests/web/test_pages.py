"""What the pages show, to whom, and what they refuse."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from redis import Redis
from support import commands
from support.store import add_history, end, heartbeat, make_run, take
from web.conftest import PASSWORD, Visitor

from ddrl.runs import records
from ddrl.store import keys, logs, metrics, runs, weights, workers
from ddrl.web import access, command, feed

INJECTIONS = (
    "<script>alert(1)</script>", "</script><script>alert(1)</script>", '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)", "{{ 7 * 7 }}", "{% raw %}", "javascript:alert(1)", "\u2028</pre><svg onload=alert(1)>",
)  # fmt: skip


def is_harmless(text: str) -> bool:
    """No injected text is markup, or a template's expression that was computed."""
    return not any(
        bad in text for bad in ("<script>alert", "<img src=x", "<svg onload", "' onmouseover='alert")
    )


def test_the_runs_are_listed_filtered_and_sorted(client: Redis, visitor: Visitor) -> None:
    assert "ddrl submit lunar" in visitor.get("/").text
    first, second = make_run(client, name="first"), make_run(client, name="second")
    add_history(client, first)
    end(client, second, "failed", "no reason")
    text = visitor.get("/").text
    assert text.index(second) < text.index(first)  # the newest first
    assert "205.0" in text and "± 1.4" in text
    text = visitor.get("/?sort=return").text
    assert text.index(first) < text.index(second)
    assert second not in visitor.get("/?status=active").text
    assert first not in visitor.get("/?q=SECOND").text
    assert "None of 2 runs is like that" in visitor.get("/?q=third").text


def test_a_run_has_all_its_parts(client: Redis, visitor: Visitor) -> None:
    run = make_run(client, algorithm={"name": "sac", "gamma": 0.97})
    add_history(client, run)
    text = visitor.get(f"/runs/{run}?over=updates&figure=staleness").text
    for part in (
        "LunarLanderContinuous-v3",
        "205.0 ± 7.0",
        "algorithm.gamma",
        "critic_loss",
        "confirm",
        "waits for experience",
    ):
        assert part in text, part
    assert visitor.get(f"/runs/{run[:-2]}").headers["location"] == f"/runs/{run}"


def test_the_episodes_are_listed(client: Redis, visitor: Visitor) -> None:
    run = make_run(client)
    add_history(client, run)
    assert "None has ended yet" in visitor.get(f"/runs/{make_run(client)}/episodes").text
    returns = sorted(row["return"] for row in records.read(client, run).episodes)
    text = visitor.get(f"/runs/{run}/episodes").text
    best, worst = text.index("<h2>Best"), text.index("<h2>Worst")
    assert best < text.index(f"{returns[-1]:,.1f}", best) < worst < text.index(f"{returns[0]:,.1f}", worst)
    assert "whole number" in visitor.get(f"/runs/{run}/episodes?seed=x").text


def test_a_run_that_is_unknown_is_said(client: Redis, visitor: Visitor) -> None:
    for path in (
        "/runs/nothing",
        "/runs/nothing/logs",
        "/runs/nothing/audit",
        "/compare?run=nothing&run=other",
    ):
        answer = visitor.get(path)
        assert answer.code == 404 and "not on this server" in answer.text
    assert visitor.get("/no/such/page").code == 404
    assert "tick two or more" in visitor.get("/compare").text


def test_logs_audit_compare_and_fleet(client: Redis, visitor: Visitor) -> None:
    one, other = make_run(client), make_run(client, algorithm={"name": "sac", "gamma": 0.9})
    add_history(client, one)
    logs.add(client, one, "learner gpu1", "ERROR", "it is full")
    workers.beat(client, heartbeat("node1", 3, "ddrl.rollout.box2d"))
    assert "it is full" in visitor.get(f"/runs/{one}/logs").text
    assert "Balanced" in visitor.get(f"/runs/{one}/audit").text
    text = visitor.get(f"/compare?run={one}&run={other}&over=env_steps").text
    assert "algorithm.gamma" in text and "0.9" in text
    text = visitor.get("/fleet").text
    assert "node1" in text and one in text and "waiting for a learner" in text


def events(visitor: Visitor, run: str, wanted: int) -> list[tuple[str, str]]:
    """Return the first events of a run."""
    connection = http.client.HTTPConnection("127.0.0.1", visitor.port, timeout=30)
    connection.request("GET", f"/runs/{run}/events", None, {"host": "localhost"})
    answer = connection.getresponse()
    found: list[tuple[str, str]] = []
    name = data = ""
    while len(found) < wanted:
        read = answer.readline().decode()
        assert read, "the stream has ended"
        for line in re.split(r"\r\n|\r|\n", read)[:-1]:  # as browsers end lines
            if line.startswith("event: "):
                name, data = line[7:], ""
            elif line.startswith("data: "):
                data += line[6:] + "\n"
            elif not line and name:
                found.append((name, data))
                name = ""
    connection.close()
    return found


def test_what_changes_is_sent(client: Redis, visitor: Visitor) -> None:
    run = make_run(client)
    token = add_history(client, run)
    first = events(visitor, run, 7)
    assert {name for name, _ in first} == {
        *("head", "cells", "evaluations", "journal", "chart", "figure", "trouble")
    }
    assert json.loads(dict(first)["chart"])["data"][0]
    metrics.add(client, run, token, {"env_steps": 31_000, "updates": 8_123})
    time.sleep(feed.EVERY_S)
    again = dict(events(visitor, run, 7))
    assert "8,123" in again["cells"]


def test_the_history_of_a_run_that_is_watched_for_long_is_read_anew(
    client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(client)
    token = add_history(client, run)
    monkeypatch.setattr(feed, "EVERY_S", 0.0)
    monkeypatch.setattr(feed, "MOST_NEW", 3)
    watched, lengths = feed.Feed(client, run), []
    monkeypatch.setattr(metrics, "read", partial(_newest, metrics.read))
    for step in range(6):
        metrics.add(client, run, token, {"env_steps": step, "updates": step})
        lengths.append(len(watched.look()[1].figures))
    assert lengths[2] == lengths[0] + 2 and lengths[3] == 1 and lengths[5] == 3


def _newest(read: Any, client: Redis, run: str, after: bytes) -> Any:
    """Return what was added, or the newest row where all is asked for, as if the server had thinned the others out."""
    rows, end = read(client, run, after)
    return (rows if after != b"0-0" else rows[-1:]), end


@pytest.mark.parametrize("end", ["\r", "\n", "\r\n", "\u2028"])
def test_no_text_is_an_event(client: Redis, visitor: Visitor, end: str) -> None:
    """Not a figure's name, which is shown as a learner writes it."""
    run = make_run(client)
    name = f"x{end}event: forged{end}data: y{end}{end}"
    metrics.add(client, run, add_history(client, run), {"env_steps": 1, "updates": 1, name: 1.0})
    runs.note(client, run, "odd", name)
    assert "forged" not in dict(events(visitor, run, 7))


def test_a_server_that_is_away_is_said(server, visitor: Visitor) -> None:
    run = make_run(server.client)
    server.kill()
    answer = visitor.get(f"/runs/{run}")
    assert answer.code == 503 and ("does not answer" in answer.text or "refused" in answer.text)


# --- safety -----------------------------------------------------------------------------------------------------------


def test_nothing_that_anyone_wrote_is_markup(client: Redis, visitor: Visitor) -> None:
    """Names, notes, log lines, figures, errors, hosts."""
    for text in INJECTIONS:
        run = make_run(client)
        token = add_history(client, run)
        other = make_run(client)
        spec = json.loads(client.get(keys.spec(other)))
        spec["name"] = spec["env"]["id"] = spec["algorithm"]["name"] = text
        client.set(keys.spec(other), json.dumps(spec))
        logs.add(client, run, text, "INFO", text)
        runs.note(client, run, text, text)
        metrics.add(client, run, token, {"env_steps": 1, "updates": 1, text: 1.0})
        client.hset(keys.counts(run), "error", text)
        client.hset(keys.refusals(run), text, text)
        forged = {
            "event": "set",
            "option": text,
            "from": json.dumps(text),
            "to": json.dumps(text),
            "env_steps": "5",
        }
        client.xadd(keys.journal(run), forged)
        workers.beat(client, heartbeat(text.replace("/", ""), 1, "ddrl.rollout.box2d"))
        for path in (
            f"/runs/{run}",
            f"/runs/{run}/logs",
            "/",
            "/fleet",
            f"/runs/{other}",
            f"/runs/{other}/logs",
        ):
            assert is_harmless(visitor.get(path).text), path
        assert all(
            is_harmless(data) for name, data in events(visitor, run, 7) if name not in ("chart", "figure")
        )
    for text in INJECTIONS:
        quoted = "".join(f"%{byte:02x}" for byte in text.encode())
        for path in (f"/?q={quoted}&sort={quoted}", f"/runs/{quoted}", f"/compare?run={quoted}&run={quoted}"):
            assert is_harmless(visitor.get(path).text), path


def test_every_answer_forbids_what_the_page_does_not_need(client: Redis, visitor: Visitor) -> None:
    for path in ("/", "/nothing", "/static/page.js", "/fleet"):
        headers = {name.lower(): value for name, value in visitor.get(path).headers.items()}
        for name, value in access.HEADERS.items():
            assert headers[name] == value
        assert headers["cache-control"] == ("no-cache" if path.startswith("/static") else "no-store")
    assert "unsafe" not in access.HEADERS["content-security-policy"]


def test_a_page_of_another_name_is_refused(visitor: Visitor) -> None:
    """Whose name leads here: a browser would let that page's scripts read these answers."""
    assert visitor.get("/", host="evil.example").code == 400
    assert visitor.get("/", host="127.0.0.1").code == 200


def test_without_a_password_nothing_is_shown(client: Redis, serve: Callable[..., Visitor]) -> None:
    visitor, run = serve(password=PASSWORD), make_run(client)
    for path in ("/", f"/runs/{run}", "/fleet", f"/runs/{run}/logs", "/compare"):
        answer = visitor.get(path)
        assert answer.code == 303 and answer.headers["location"].startswith("/login?to=")
    assert visitor.get(f"/runs/{run}/events").code == 401
    assert visitor.log_in(password="wrong").code == 403
    assert visitor.get("/").code == 303
    assert visitor.log_in().code == 303
    assert run in visitor.get("/").text and "Ada" in visitor.get("/").text


@pytest.mark.parametrize("path", ["/login", "/runs/{run}/set"])
def test_a_form_with_a_file_or_of_any_length_is_refused(
    client: Redis, serve: Callable[..., Visitor], path: str
) -> None:
    visitor = serve(password=PASSWORD, controls=True)
    visitor.log_in()
    path = path.format(run=make_run(client))
    file = '--x\r\ncontent-disposition: form-data; name="a"; filename="b"\r\n\r\nhello\r\n--x--\r\n'
    headers = {
        "origin": f"http://localhost:{visitor.port}",
        "content-type": "multipart/form-data; boundary=x",
    }
    assert visitor.send("POST", path, file, headers).code == 400
    assert visitor.post(path, {"to": "x" * 100_000}).code == 400
    assert visitor.post(path, {str(number): "x" for number in range(100)}).code == 400


def test_a_login_leads_to_no_other_site(client: Redis, serve: Callable[..., Visitor]) -> None:
    visitor = serve(password=PASSWORD)
    for to in ("//evil.example", "https://evil.example", "\\\\evil.example"):
        answer = visitor.post("/login", {"name": "Ada", "password": PASSWORD, "to": to})
        assert answer.headers["location"] == "/"
    assert (
        visitor.post("/login", {"name": "A", "password": PASSWORD}, origin="http://evil.example").code == 403
    )


def token_of(visitor: Visitor, run: str) -> str:
    text = visitor.get(f"/runs/{run}").text
    return text.partition('name="token" value="')[2].partition('"')[0]


def test_a_run_is_changed_by_who_may(client: Redis, serve: Callable[..., Visitor]) -> None:
    """Each change is in the journal with who did it."""
    visitor, run = serve(password=PASSWORD, controls=True), make_run(client)
    visitor.log_in("Ada <b>")
    form = {"token": token_of(visitor, run)}
    assert form["token"]
    assert visitor.post(f"/runs/{run}/pause", form).code == 303
    assert runs.status(client, run) == "paused"
    wanted = form | {"option": "algorithm.learning_rate", "value": "3e-4"}
    assert visitor.post(f"/runs/{run}/set", wanted).code == 303
    assert runs.config(client, run).algorithm["learning_rate"] == 3e-4
    notes = [row["reason"] for row in runs.journal(client, run)[0] if row["event"] == "control"]
    assert notes == ["Ada <b>: paused", "Ada <b>: algorithm.learning_rate 0.001 -> 0.0003"]
    wrong = visitor.post(f"/runs/{run}/set", form | {"option": "algorithm.learning_rat", "value": "1"})
    assert wrong.code == 400 and "algorithm.learning_rate" in wrong.text
    assert visitor.post(f"/runs/{run}/pause", form).code == 400  # it is paused


def test_a_policy_is_exported(client: Redis, serve: Callable[..., Visitor]) -> None:
    visitor, run = serve(password=PASSWORD, controls=True), make_run(client)
    visitor.log_in()
    blob = weights.encode_weights({"weight": np.zeros(3, np.float32)})
    weights.publish(client, run, take(client, run), version=0, blob=blob, allowance=0, updates=0)
    form = {"token": token_of(visitor, run), "version": ""}  # the best, or the latest
    answer = visitor.post(f"/runs/{run}/export", form)
    assert answer.code == 303
    sent = visitor.get(answer.headers["location"])
    assert f'filename="{run}-v0.safetensors"' in sent.headers["content-disposition"]
    data = sent.text.encode()
    assert weights.decode_weights(data)["weight"].shape == (3,)
    assert weights.weights_metadata(data)["run"] == run
    assert [row["reason"] for row in runs.journal(client, run)[0] if row["event"] == "control"] == [
        "Ada: exports version 0"
    ]
    assert visitor.post(f"/runs/{run}/export", form | {"version": "x"}).code == 400
    assert visitor.get(f"/runs/{run}/policy?version=7").code == 400  # it is not kept
    assert serve().get(f"/runs/{run}/policy").code == 403


@pytest.mark.parametrize("harm", ["no session", "stale session", "another site", "no token", "only shows"])
def test_a_change_by_others_is_refused(client: Redis, serve: Callable[..., Visitor], harm: str) -> None:
    visitor, run = serve(password=PASSWORD, controls=harm != "only shows"), make_run(client)
    visitor.log_in()
    form, headers = {"token": token_of(visitor, run)}, {}
    if harm == "no session":
        visitor.cookies.clear()
    elif harm == "stale session":
        visitor.cookies[access.COOKIE] = "of an earlier process"
    elif harm == "another site":
        headers["origin"] = "http://evil.example"
    elif harm == "no token":
        form = {"token": ""}
    for action in ("pause", "stop", "resume", "set", "evaluate", "export"):
        assert visitor.post(f"/runs/{run}/{action}", form, **headers).code == 403
    assert runs.status(client, run) == "active"


def test_the_settings_shown_are_those_that_differ(client: Redis, visitor: Visitor) -> None:
    run = make_run(client)
    assert "algorithm.gamma" not in visitor.get(f"/runs/{run}").text


def test_a_start_that_cannot_be_is_refused(client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(command.PASSWORD, raising=False)
    assert f"set {command.PASSWORD}" in commands.refused("web", "--control")
    assert f"set {command.PASSWORD}" in commands.refused("web", "--listen", "0.0.0.0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "in use; give another" in commands.refused("web", "--port", str(port))
    monkeypatch.setattr(command, "EXTRA", ("no_such_package",))
    assert "pip install 'ddrl[web]'" in commands.refused("web")
