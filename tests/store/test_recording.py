"""A run's stream on disk, and back."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.learners import Run, training
from support.private_server import PrivateServer, until
from support.runs import target_config
from support.store import end

from ddrl.config import ConfigError, validate
from ddrl.runs import submit
from ddrl.store import keys, ledger, recording, runs, stream
from ddrl.store.connection import StoreError, connect
from ddrl.store.recording import Recording, entries
from ddrl.store.stream import Entry


@pytest.fixture
def other_server(make_server: Callable[..., PrivateServer]) -> PrivateServer:
    return make_server()


def played(server: PrivateServer, steps: int = 300) -> Run:
    run = Run(server, target_config())
    run.take()
    run.play(steps)
    return run


def test_a_folder_has_every_entry_as_it_is(server: PrivateServer, tmp_path: Path) -> None:
    run = played(server)
    record = Recording(run.client, run.id, tmp_path / "a")
    assert record.catch_up() and not record.catch_up()
    first = run.entries
    assert list(entries(tmp_path / "a")) == first and record.num_missed == 0
    run.play(200)
    assert record.catch_up() and list(entries(tmp_path / "a")) == run.entries
    assert record.num_steps == run.state.appended_steps and len(run.entries) == record.num_entries > len(
        first
    )


def test_it_goes_on_where_it_was_killed(
    server: PrivateServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "SEGMENT_BYTES", 2_000)
    run = played(server)
    Recording(run.client, run.id, tmp_path).catch_up()
    newest = sorted(tmp_path.glob("*.resp"))[-1]
    whole = newest.read_bytes()
    newest.write_bytes(whole[:-7])  # of the last entry
    run.play(200, anew=True)
    record = Recording(run.client, run.id, tmp_path)
    record.catch_up()
    assert list(entries(tmp_path)) == run.entries and record.num_missed == 0
    assert len(list(tmp_path.glob("*.resp"))) > 1


def test_what_left_the_stream_before_is_counted(server: PrivateServer, tmp_path: Path) -> None:
    run = played(server)
    record = Recording(run.client, run.id, tmp_path)
    record.catch_up()
    run.play(300)
    all_of_them = run.entries
    kept = all_of_them[-2]
    run.client.xtrim(keys.experience(run.id), minid=kept.entry_id, approximate=False)
    record.catch_up()
    missed = len(all_of_them) - record.num_entries
    assert record.num_missed == missed > 0
    del record
    assert Recording(run.client, run.id, tmp_path).num_missed == missed


def test_a_folder_has_one_writer_at_a_time(server: PrivateServer, tmp_path: Path) -> None:
    run = played(server)
    record = Recording(run.client, run.id, tmp_path)
    record.catch_up()
    for _ in range(2):
        with pytest.raises(StoreError, match="is being recorded to already; end that, or name another"):
            Recording(run.client, run.id, tmp_path)
    record.close()
    assert Recording(run.client, run.id, tmp_path).num_entries == len(run.entries)


def test_late_ids_are_left_until_they_are_lowered_and_a_stream_that_began_again_is_refused(
    server: PrivateServer, tmp_path: Path
) -> None:
    run = played(server)
    record = Recording(run.client, run.id, tmp_path)
    run.client.xadd(keys.experience(run.id), {"x": 1}, id="7258118400000-0")
    assert record.catch_up() and list(entries(tmp_path)) == run.entries[:-1] and not record.catch_up()
    run.client.delete(keys.experience(run.id))
    assert not record.catch_up()
    run.client.xadd(keys.experience(run.id), {"x": 1}, id="5-0")
    with pytest.raises(StoreError, match="is ahead of the stream of .*; move it away"):
        record.catch_up()


def test_entries_that_are_ahead_of_the_clock_like_what_was_read_are_recorded(
    server: PrivateServer, tmp_path: Path
) -> None:
    """The server's clock was set back since, or was another one before the run was restored."""
    run, late = played(server), b"7258118400000-0"
    key = keys.experience(run.id)
    run.client.xdel(key, run.client.xadd(key, {"x": 1}, id=late))
    ledger.put(run.client, run.id, 0, {}, late)
    run.play(300)
    record = Recording(run.client, run.id, tmp_path)
    assert record.catch_up() and list(entries(tmp_path)) == run.entries
    assert stream.order(record.last) > stream.order(late) and not record.catch_up()


def test_runs_of_all_algorithms_may_be_recorded() -> None:
    for name in ("ppo", "dqn"):
        config = {"env": {"id": "CartPole-v1"}, "algorithm": {"name": name}, "replay": {"retain": "all"}}
        submit.prepare(validate(config))


def test_another_server_learns_from_it(
    server: PrivateServer, other_server: PrivateServer, tmp_path: Path
) -> None:
    run = played(server, 2_000)
    Recording(run.client, run.id, tmp_path).catch_up()
    source = recording.restore(other_server.client, tmp_path)
    there = Run(other_server, run=source)
    assert source == run.id and there.entries == run.entries
    state = there.state
    assert (
        state.ended
        and not state.leased
        and state.reason == "recorded"
        and source not in runs.open_names(there.client)
    )
    assert recording.restore(other_server.client, tmp_path) == source  # again
    other_server.client.delete(keys.counts(source))  # as if that had been killed
    other_server.client.xtrim(keys.experience(source), maxlen=1)
    assert recording.restore(other_server.client, tmp_path) == source and there.entries == run.entries
    config = submit.config_of_data(there.client, source, target_config())
    assert config.replay.samples_per_insert == submit.UNLIMITED
    other = Run(other_server, run=submit.create_shadow(there.client, source, config))
    learner = other.learner()
    with training(learner):
        until(lambda: learner.shared.updates > 500)
    learner.finish()
    assert learner.shared.env_steps == run.state.appended_steps and not other.dead
    assert there.entries == run.entries


def test_two_commands_may_put_it_back_at_once(
    server: PrivateServer, other_server: PrivateServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, found = played(server, 2_000), entries
    Recording(run.client, run.id, tmp_path).catch_up()
    monkeypatch.setenv("DDRL_REDIS_URL", other_server.url)

    def slowly(folder: Path) -> Iterator[Entry]:
        for entry in found(folder):
            time.sleep(4.0 / len(run.entries))  # a lease lasts 3 s
            yield entry

    monkeypatch.setattr(recording, "entries", slowly)
    with ThreadPoolExecutor() as pool:
        clients = [connect(other_server.url) for _ in range(3)]
        assert {*pool.map(recording.restore, clients, [tmp_path] * 3)} == {run.id}
    there = Run(other_server, run=run.id)
    assert there.entries == run.entries and not there.state.leased


@pytest.mark.parametrize("name", ["bc", "iql"])
def test_what_another_algorithm_played_is_learned_from(server: PrivateServer, name: str) -> None:
    run = played(server, 1_000)
    end(run.client, run.id)
    tree = target_config().model_dump(mode="json", by_alias=True)
    given = validate(tree | {"algorithm": {"name": name, "hidden_sizes": [16]}})
    config = submit.config_of_data(run.client, run.id, given)
    other = Run(server, run=submit.create_shadow(run.client, run.id, config))
    learner = other.learner()
    with training(learner):
        until(lambda: learner.shared.updates > 200 and learner.shared.env_steps == run.state.appended_steps)
    learner.finish()
    assert other.index.latest >= 1 and not other.dead


def test_what_cannot_be_put_back(server: PrivateServer, other_server: PrivateServer, tmp_path: Path) -> None:
    run = played(server)
    Recording(run.client, run.id, tmp_path / "a").catch_up()
    with pytest.raises(StoreError, match=r"its run .* is on this server; `ddrl learner --shadow"):
        recording.restore(run.client, tmp_path / "a")
    with pytest.raises(StoreError, match="is no recording; `ddrl record RUN -o"):
        recording.restore(other_server.client, tmp_path / "b")
    with pytest.raises(StoreError, match="is a recording of"):
        Recording(run.client, played(server).id, tmp_path / "a")
    [segment] = (tmp_path / "a").glob("*.resp")
    segment.write_bytes(segment.read_bytes() + b"x")
    with pytest.raises(StoreError, match=r"000001.resp: is damaged after byte [\d,]+; remove it"):
        recording.restore(other_server.client, tmp_path / "a")
    assert runs.names(other_server.client) == []  # nothing half made is left
    about = json.loads((tmp_path / "a" / "run.json").read_text())
    (tmp_path / "a" / "run.json").write_text(json.dumps(about | {"run": "a}:*"}))
    with pytest.raises(StoreError, match="is no recording"):
        recording.restore(other_server.client, tmp_path / "a")
    (tmp_path / "a" / "run.json").write_text(json.dumps(about | {"format": 2}))
    with pytest.raises(StoreError, match="has format 2, this version of ddrl reads 1"):
        recording.restore(other_server.client, tmp_path / "a")


def test_data_of_another_environment_are_refused(server: PrivateServer) -> None:
    run = played(server)
    end(run.client, run.id)
    other = target_config(env={"id": "CartPole-v1"}, algorithm={"name": "dqn"})
    with pytest.raises(ConfigError, match="env.id: CartPole-v1, but the data are of ddrl/"):
        submit.config_of_data(run.client, run.id, other)
