"""The ACL examples on a real server: each role does all its work as its own user, and nothing else."""

from __future__ import annotations

import re
import shlex
import signal
from dataclasses import asdict

import pytest
import redis
from support.commands import call, call_json, refused
from support.learners import in_threads
from support.private_server import refusal, until
from support.processes import Processes
from support.roles import ACL, ROLES, Roles
from support.runs import play_steps, start, target_config
from support.store import fold_now

from ddrl.runs.prune import prune
from ddrl.store import connection, keys, leases, runs, segments, stream
from ddrl.store import local_checkpoints as local
from ddrl.store.checkpoints import Counters
from ddrl.store.segments import Process

Patch = pytest.MonkeyPatch


def test_the_roles_do_all_their_work(roles: Roles, processes: Processes, monkeypatch: Patch) -> None:
    monkeypatch.setenv(connection.URL_VARIABLE, roles.url("operator"))
    monkeypatch.chdir(processes.folder)
    config = processes.config(stop={"return": None, "time": 600}, rollout={"segment_s": 1})
    worker = processes.worker(roles.url("worker"), "--role", "all")
    processes.until(lambda: "ready" in worker.text())  # before anyone has loaded the scripts
    run = call_json("submit", str(config), "--detach")["run"]
    began = roles.proxy.num_connections
    learner = processes.learner(roles.url("learner"), run)

    def evaluated() -> bool:
        assert roles.denied() == [], processes.logs()
        return runs.state(roles.admin, run).evaluation is not None

    processes.until(evaluated)
    assert roles.proxy.num_connections - began >= 6

    def steps() -> int:
        return int(roles.admin.hget(keys.counts(run), "appended_steps") or 0)

    before = steps()
    roles.admin.script_flush()  # as a server that begins anew; the learner loads them
    processes.until(lambda: steps() > before + 200)
    assert set(roles.denied()) <= {"ddrl-worker: command script|load (script|load)"}
    for words in (["status", run], ["runs"], ["fleet"], ["logs", run], ["journal", run], ["audit", run]):
        call(*words)
    call("set", run, "learner.publish_every_s=0.2")
    roles.admin.xadd(keys.experience(run), {"h": "poison"})
    call("pause", run)
    processes.until(lambda: not segments.playing(roles.admin, run))
    call("resume", run, "--detach")
    assert "return_mean" in call("evaluate", run, "--episodes", "4", "--json")
    call("stop", run)
    assert learner.wait() == 0
    worker.send_signal(signal.SIGTERM)
    worker.wait()
    assert roles.denied() == []
    call("export", run, "--output", "policy.safetensors")
    call("delete", run, "--yes")
    assert [key for key in roles.admin.scan_iter("ddrl:*") if run.encode() in key] == []
    call("doctor")
    assert set(roles.denied()) <= {"ddrl-operator: command config|get (config|get)"}
    logged = learner.text() + worker.text()
    assert "rediss://" in worker.text() and "insecure" not in logged and "password-of" not in logged


def commands(text: str) -> list[list[str]]:
    """Commands between bars and line ends."""
    return [shlex.split(part) for part in text.replace("\n", "|").split("|") if part.strip()]


STATE, SPEC, LEASE, JOURNAL, WEIGHTS, EXPERIENCE, COUNTS, DRAINING = (
    keys.of_run("run", name)
    for name in ("state", "spec", "lease", "journal", "weights", "experience", "counts", "draining")
)
PART, BLOB = keys.checkpoint_part("run", 1, 1, 0), keys.weights_blob("run", 1)
FORBIDDEN_TO_ALL = commands(f"""
    GET other | SET other 1 | DEL other | KEYS * | RANDOMKEY | DBSIZE | FLUSHALL | FLUSHDB | SWAPDB 0 1
    CONFIG GET * | CONFIG SET maxmemory 1 | ACL LIST | ACL SETUSER me on | CLIENT LIST | CLIENT KILL ID 1
    MONITOR | SLOWLOG GET | MODULE LIST | REPLICAOF a 1 | SAVE | FUNCTION LIST | PUBLISH other x
    MIGRATE h 1 '' 0 9 | COPY {STATE} other | RENAME {STATE} other | SHUTDOWN NOSAVE
    EVAL "return redis.call('GET', 'other')" 0 | EVAL "return redis.call('FLUSHALL')" 0
""")
FORBIDDEN = {
    "operator": [],
    "learner": commands(f"""
        SET {keys.worker("forged")} x | DEL {keys.worker("node")} | PSUBSCRIBE * | SCRIPT FLUSH
        PUBLISH {keys.BROKER_PREFIX}/0.celery.pidbox x
    """),
    "worker": commands(f"""
        SET {BLOB} x | HSET {WEIGHTS} latest 9 | SET {PART} x | GET {PART} | SET {SPEC} x | SET {LEASE} 1
        DEL {LEASE} | DEL {STATE} | DEL {JOURNAL} | EXPIRE {STATE} 1 | HDEL {STATE} status | UNLINK {EXPERIENCE}
        XTRIM {EXPERIENCE} MAXLEN 0 | XDEL {EXPERIENCE} 0-1 | HSET {keys.ledger("run")} 1 x
        XADD {keys.metrics("run")} * row x | XADD {keys.allowance("run")} * allowance 9
        HSET {STATE} status failed | HSETNX {STATE} x y | HINCRBY {STATE} fence 1 | HSET {STATE} checkpoint x
        HSET {keys.evaluating("run")} 1:2:3 x | HDEL {keys.evaluating("run")} 1:2:3
        HSET {keys.evaluating("run", "r")} 1:2:3 x | EXPIRE {keys.players("run", "r")} 1
        HSET {EXPERIENCE} a b | RPUSH {COUNTS} a | SADD {COUNTS} a | XADD {COUNTS} * a b | INCRBY {COUNTS} 1
        XADD {keys.producers("run")} * a b | HSET {JOURNAL} a b | SADD {JOURNAL} a | HSET {DRAINING} a b
        HSET {keys.PRODUCERS} a b | INCRBY {keys.PRODUCERS} 9 | SET {keys.PRODUCERS} 9 | SADD {keys.PRODUCERS} a
        HSET {keys.WORKERS} a b | SADD {keys.BROKEN} a | HDEL {COUNTS} a | HDEL {keys.producers("run")} 1 | DEL {COUNTS}
        EXPIRE {COUNTS} 1 | EXPIRE {EXPERIENCE} 1 | XSETID {EXPERIENCE} 9-9 | SET {COUNTS} x
        HSET {keys.queue("ddrl.rollout")} a b | SADD {keys.queue("ddrl.rollout")} a
        LPUSH {keys.BROKER_PREFIX}_kombu.binding.ddrl.rollout a
        SADD {keys.BROKER_PREFIX}_kombu.binding.ddrl.rollout a | SADD {keys.BROKER_PREFIX}_kombu.binding_permanent.x a
        EVAL "return 1" 0 | EVAL_RO "return 1" 0 | SCRIPT LOAD "return 1" | FCALL x 0 | SELECT 1
        XADD {keys.dead("run")} * a b | ZADD {keys.RUNS} 1 run | ZREM {keys.RUNS} run | ZADD {keys.OPEN} 1 run
        ZREM {keys.OPEN} run | SCAN 0 | PSUBSCRIBE * | SCRIPT FLUSH
        PUBLISH {keys.BROKER_PREFIX}/0.celery.pidbox x
    """),
}


def is_denied(client: redis.Redis, words: list[str]) -> bool:
    try:
        client.execute_command(*words)
    except redis.ResponseError as error:
        return "permission" in str(error).lower() or "ACL" in str(error)
    return False


def test_the_roles_do_nothing_else(roles: Roles) -> None:
    roles.admin.set("other", "1")
    roles.admin.hset(STATE, "status", "active")
    for role, forbidden in FORBIDDEN.items():
        with connection.connect(roles.url(role)) as client:
            assert client.ping()
            allowed = [words for words in (*FORBIDDEN_TO_ALL, *forbidden) if not is_denied(client, words)]
            assert allowed == [], role
    assert roles.admin.get("other") == b"1" and roles.admin.dbsize() == 2


def test_what_a_role_does_rarely_it_may_do_too(roles: Roles) -> None:
    worker, learner, operator = (connection.connect(roles.url(role)) for role in ROLES)
    with worker, learner, operator:
        run = start(operator, target_config())
        token = leases.acquire(learner, run, host="h", folder="f", ttl_ms=600_000)
        learner.bgrewriteaof()
        assert fold_now(learner, run, token, {}) == 0
        play_steps(learner, run, token, 20)
        process = Process.this("node")
        assert segments.choose(worker, process, ["ddrl.rollout"]) == run
        assert segments.run_of_task(worker, "none") is None
        segments.drain(worker, "node")
        segments.stay(worker, "node")
        assert segments.note_crash(worker, run, "a reason") == 1
        segments.note_refusal(worker, run, "host", "a reason")
        segments.end(worker, run, process, process_ms=5, room_wait_ms=5)
        assert not segments.note_lost(learner, run, [str(process)], "a reason")
        stream.claim(learner, run, 1)
        stream.trim(learner, run, token, b"0-2")
        prune(learner, 0, 0)
        runs.set_status(learner, run, "paused", "quarantined", token=token)
        runs.reactivate(operator, run)
        runs.request_handover(operator, run, "host")
        token = leases.acquire(learner, run, host="h", folder="f", force=True)
        snapshot = local.Snapshot(run, token, local.record(learner, run), asdict(Counters()), b"tensors")
        leases.release(learner, run, token)
        runs.set_status(operator, run, "stopped", "by hand")
        token = leases.acquire(operator, run, host="h", folder="f")
        runs.complete(operator, run, token)
        leases.release(operator, run, token)
        assert runs.delete(operator, run) > 5
        assert local.restore(learner, snapshot, even_deleted=True)
    assert roles.denied() == []


def test_an_operator_ends_a_script_that_does_not_end(roles: Roles) -> None:
    roles.admin.config_set("lua-time-limit", 50)
    ended: list[str] = []

    def occupy() -> None:
        with (
            connection.connect(roles.url("learner")) as learner,
            pytest.raises(redis.ResponseError) as caught,
        ):
            learner.eval("while true do end", 0)
        ended.append(str(caught.value))

    with connection.connect(roles.url("operator")) as operator, in_threads(occupy, stop=roles.admin.close):
        until(lambda: is_busy(operator))
        assert operator.script_kill()
        until(lambda: ended)
        assert "killed" in ended[0] and operator.ping()


def is_busy(client: redis.Redis) -> bool:
    try:
        return not client.ping()
    except redis.ResponseError as error:
        return connection.outage(error) == "the server is busy with a script; SCRIPT KILL ends it"


def test_what_a_role_may_not_do_is_one_line(roles: Roles, processes: Processes, monkeypatch: Patch) -> None:
    assert "it requires a password" in refusal(f"rediss://{roles.proxy.address}")
    monkeypatch.setenv(connection.URL_VARIABLE, roles.url("worker"))
    submit = "submit", str(processes.config()), "--detach"
    assert "does not know ddrl's scripts" in refused(*submit, code=3)
    with connection.connect(roles.url("learner")) as learner:
        runs.names(learner), stream.remaining(learner, "none")  # loads them
    assert "permission" in refused(*submit, code=3)


def test_the_examples_hold_no_password_and_no_key_that_is_not_ours() -> None:
    files = {path.stem: path.read_text("utf-8") for path in ACL.glob("*.acl")}
    assert set(files) == {"default", *ROLES} and files["default"] == "user default reset off\n"
    table = keys.__doc__ or ""
    for role in ROLES:
        text = files[role]
        assert text.startswith(f"user ddrl-{role} reset on #SHA256_OF_THE_PASSWORD_OF_{role.upper()} ")
        assert text.count("\n") == 1 and ">" not in text and "nopass" not in text
        for name in re.findall(r"~(ddrl:\S+?)\)?(?:\s|$)", text):
            known = re.sub(r"broker:.*", "broker:*", name.replace("{*}", "{run}"))
            known = re.sub(r"(worker|weights|evaluating|players|evaluations):\*$", r"\1:<", known)
            assert f"| {known}" in table or known in ("ddrl:*", "ddrl:{run}:*"), name
