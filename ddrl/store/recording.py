"""Experience on disk: the stream of a run as a folder, written while the run goes on, and put back on any server.

A folder holds `run.json` (what the run is) and segments of the stream, `000001.resp` and so on. In a segment each entry
is the command XADD with its id, as it goes over the wire (RESP).
"""

from __future__ import annotations

import json
import os
import re
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import hiredis

from ddrl.config import ConfigError, RunConfig, first_line, validate_stored
from ddrl.store import capped_streams, keys, leases, ledger, runs, stream
from ddrl.store.connection import Redis, StoreError
from ddrl.store.local_checkpoints import write_whole
from ddrl.store.server import try_lock, unlock
from ddrl.store.stream import Entry
from ddrl.types import EnvSpec

FORMAT = 1
FILE = "run.json"
SEGMENT_BYTES = 64 * 1024**2
CHUNK_BYTES = 1024**2  # read from a file at once
COUNTED = ("num_entries", "num_steps", "num_bytes", "num_missed", "_fragments", "_segment")
COUNTS = ("appended_fragments", "appended_steps", "appended_bytes")
POLL_S = 0.5
RECORDED = "recorded"  # reason of the end of a run that was put back


class Recording:
    """A folder that a run's stream is written to; goes on where an earlier command ended.

    Args:
        client: connection to the server.
        run: its id.
        folder: made if absent.

    Attributes:
        last: id of the newest entry.
        num_entries, num_steps, num_bytes: written, with those of earlier commands.
        num_missed: fragments that had left the stream before they could be read.
        close: lets another one write there.

    Raises:
        UnknownRunError: there is no such run.
        StoreError: the folder is another run's, damaged, or being written to.
    """

    def __init__(self, client: Redis, run: str, folder: Path) -> None:
        self._client, self._run, self._folder = client, run, folder
        self._key, self._fragments = keys.experience(run), 0
        self._segment, self._end = 1, 0  # the newest file, and the bytes of its whole entries
        self.last, self.num_entries, self.num_steps, self.num_bytes, self.num_missed = b"0-0", 0, 0, 0, 0
        versions, config = runs.state(client, run).versions, runs.spec(client, run)
        self._about = {"format": FORMAT, "run": run, "versions": versions, "config": config}
        self._about["spaces"] = asdict(runs.spaces(client, run))
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock = try_lock(folder / "lock")
        if lock is None:
            raise StoreError(f"{folder}: is being recorded to already; end that, or name another folder")
        self.close = weakref.finalize(self, unlock, lock)
        if (folder / FILE).exists():
            found = _described(folder)
            if found["run"] != run:
                raise StoreError(f"{folder}: is a recording of {found['run']}; name another folder")
            self.last = found["whole"]["last"].encode()
            for name in COUNTED:
                setattr(self, name, found["whole"][name])
            for path in _segments(folder)[self._segment - 1 :]:
                self._segment, self._end = int(path.stem), 0
                for entry, self._end in _read(path):
                    self._count(entry)
        else:
            self._describe()

    def catch_up(self) -> bool:
        """Write what has been appended since; return whether there was anything.

        Raises:
            StoreError: it cannot be written, or the stream has begun again.
        """
        newest, before = stream.newest(self._client, self._run, 1), self.num_entries
        if not newest:
            return False
        until, latest = newest[0].entry_id, capped_streams.latest(self._client)
        if stream.order(until) > stream.order(latest):  # as the learner's reader does
            cursor = ledger.read(self._client, self._run)[1]
            latest = max(latest, capped_streams.day_after(cursor), key=stream.order)
            until = min(until, latest, key=stream.order)
        if stream.order(until) < stream.order(self.last):
            raise StoreError(f"{self._folder}: is ahead of the stream of {self._run}; move it away")
        for page in stream.pages(self._client, self._run, self.last, until):
            self._write(page)
        return self.num_entries > before

    def _describe(self) -> None:
        """Write what the run is, and the counts of the segments before the newest one."""
        whole = {name: getattr(self, name) for name in COUNTED} | {"last": self.last.decode()}
        with _writing(self._folder):
            write_whole(self._folder / FILE, json.dumps(self._about | {"whole": whole}, indent=1).encode())

    def _write(self, page: Sequence[Entry]) -> None:
        if self._end >= SEGMENT_BYTES:
            self._segment, self._end = self._segment + 1, 0
            self._describe()
        path = self._folder / f"{self._segment:06}.resp"
        with _writing(path), path.open("ab") as file:
            file.truncate(self._end)  # a part of a page that could not be written before
            file.writelines(_command(self._key, entry) for entry in page)
            file.flush()
            os.fsync(file.fileno())  # the stream may be trimmed now
        self._end = path.stat().st_size
        for entry in page:
            self._count(entry)

    def _count(self, entry: Entry) -> None:
        fragments, steps, _ = entry.counted or (self._fragments + 1, self.num_steps, 0)
        self.num_missed += max(0, fragments - self._fragments - 1)
        self._fragments, self.num_steps = fragments, steps
        self.last, self.num_entries = entry.entry_id, self.num_entries + 1
        self.num_bytes += entry.num_bytes


def entries(folder: Path) -> Iterator[Entry]:
    """Yield the entries of a recording, oldest first; the last one may be missing where a writer was killed.

    Raises:
        StoreError: a segment is damaged.
    """
    for path in _segments(folder):
        yield from (entry for entry, _ in _read(path))


def run_of(folder: Path) -> str:
    """Return the id of the run that a folder is a recording of.

    Raises:
        StoreError: it is none.
    """
    return str(_described(folder)["run"])


def restore(
    client: Redis, folder: Path, on_bytes: Callable[[int, int], None] = lambda done, total: None
) -> str:
    """Put a recorded run on the server, as one that has ended, with all its experience; return its id.

    One that was put there before is left as it is, and one that another command puts there is waited for.

    Args:
        client: connection to the server.
        folder: of the recording.
        on_bytes: called now and then with the bytes written, and about those of all.

    Raises:
        StoreError: the folder is no recording, or the run is on the server.
    """
    about = _described(folder)
    run = str(about["run"])
    while True:
        if runs.status(client, run) is None:
            config, spaces = _config(folder, about)
            nobody, versions = (runs.NOBODY, runs.NOBODY), about["versions"]
            runs.create(client, config, spaces, queues=nobody, versions=versions, run=run)
        state = runs.state(client, run)
        if state.reason != RECORDED:
            if state.outcome or state.reads or state.appended_steps or state.queue != runs.NOBODY:
                raise StoreError(
                    f"{folder}: its run {run} is on this server; `ddrl learner --shadow {run}` learns from what that "
                    "has, `ddrl delete` (without --files) makes room for the recording"
                )
            runs.set_status(client, run, "stopped", RECORDED)  # it is new, of this command or another one
        elif state.appended_steps and not state.leased:
            return run
        elif (token := leases.acquire(client, run, host="-", folder=str(folder.resolve()))) is None:
            time.sleep(POLL_S)  # another command has it, or a learner, which ends
        else:
            runs.complete(client, run, token)
            if runs.state(client, run).appended_steps:  # by now
                leases.release(client, run, token)
                return run
            client.unlink(keys.experience(run), keys.producers(run))  # of a command that was killed
            break
    try:
        with leases.kept(run, token):
            _append(client, run, folder, on_bytes)
    except BaseException:
        leases.release(client, run, token)
        runs.delete(client, run)
        raise
    leases.release(client, run, token)
    return run


def _append(client: Redis, run: str, folder: Path, on_bytes: Callable[[int, int], None]) -> None:
    """Put a recording's entries into the stream of a run, and count them."""
    done, waiting, total = 0, 0, sum(path.stat().st_size for path in _segments(folder))
    producers: dict[Any, Any] = {}  # a learner takes only what these have appended
    counts: dict[Any, Any] = {}
    pipe = client.pipeline(transaction=False)
    for entry in entries(folder):
        pipe.xadd(keys.experience(run), cast(Any, entry.fields), id=entry.entry_id)
        done, waiting = done + entry.num_bytes, waiting + entry.num_bytes
        if entry.producer >= 0:
            newest = {"incarnation": str(entry.count(b"i")), "seq": entry.count(b"q")}
            producers[entry.producer] = json.dumps(newest | {"fragments": 0, "duplicates": 0})
            counts = dict(zip(COUNTS, entry.counted, strict=False)) or counts
        if waiting > stream.REPLY_BYTES:
            pipe.execute()
            on_bytes(done, total)
            waiting = 0
    if counts:
        pipe.hset(keys.producers(run), mapping=producers)
        pipe.hset(keys.counts(run), mapping=counts)
    pipe.execute()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raise a StoreError where the path cannot be written."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path}: cannot be written ({error.strerror}); make room there") from None


def _config(folder: Path, about: dict[str, Any]) -> tuple[RunConfig, EnvSpec]:
    try:
        return validate_stored(about["config"]), EnvSpec.from_json(about["spaces"])
    except (ConfigError, ValueError) as error:
        raise StoreError(f"{folder}: was recorded by another version of ddrl ({first_line(error)})") from None


def _described(folder: Path) -> dict[str, Any]:
    """Return what a recording is of.

    Raises:
        StoreError: the folder is none, or of another format.
    """
    try:
        about = json.loads((folder / FILE).read_bytes())
        if about["format"] != FORMAT:
            raise StoreError(
                f"{folder}: has format {about['format']!s:.20}, this version of ddrl reads {FORMAT}"
            )
        if not re.fullmatch(r"[a-z0-9-]{1,80}", about["run"]):  # it becomes part of keys
            raise ValueError
        whole = about["whole"]
        about["whole"] = {name: int(whole[name]) for name in COUNTED} | {"last": whole["last"]}
        return {name: about[name] for name in ("run", "versions", "config", "spaces", "whole")}
    except (OSError, ValueError, TypeError, KeyError):
        raise StoreError(f"{folder}: is no recording; `ddrl record RUN -o {folder}` makes one") from None


def _segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("[0-9]*.resp"))


def _read(path: Path) -> Iterator[tuple[Entry, int]]:
    """Yield each entry of a segment, and the number of bytes up to its end."""
    reader, end = hiredis.Reader(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            try:
                reader.feed(chunk)
                while (command := reader.gets()) is not False:
                    name, key, entry_id, *fields = command
                    if name != b"XADD" or len(fields) % 2:
                        raise ValueError
                    entry = Entry(entry_id, dict(zip(fields[::2], fields[1::2], strict=True)))
                    end += len(_command(key.decode(), entry))
                    yield entry, end
            except (hiredis.HiredisError, ValueError, TypeError):
                raise StoreError(
                    f"{path}: is damaged after byte {end:,}; remove it and those after it"
                ) from None


def _command(key: str, entry: Entry) -> bytes:
    fields: Any = [part for field in entry.fields.items() for part in field]
    return cast(bytes, hiredis.pack_command(("XADD", key, entry.entry_id, *fields)))
