"""The newest checkpoint in the run's folder, with all that a server must know of the run: seeds on disk.

`checkpoint.json` names the file of tensors and is renamed into place last, so that a copy is whole or the one before.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddrl.store import runs, seeds
from ddrl.store.connection import StoreError
from ddrl.store.runs import UnknownRunError
from ddrl.store.seeds import Known, Seed

if TYPE_CHECKING:
    from redis import Redis

log = logging.getLogger(__name__)

FORMAT = 1
FOLDER = "checkpoint"  # within the run's
POINTER = "checkpoint.json"


def write(folder: Path, seed: Seed) -> None:
    """Replace the copy in a run's folder, unless a later learner's is there.

    Raises:
        OSError: it cannot be written; the one before is intact.
    """
    place = folder / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    if _is_later(folder, seed):
        return
    tensors = place / f"{seed.token}-{seed.meta['updates']}-{zlib.crc32(seed.blob):08x}.safetensors"
    pointer = {
        "format": FORMAT,
        "run": seed.run,
        "token": seed.token,
        "tensors": tensors.name,
        "bytes": len(seed.blob),
        "crc32": zlib.crc32(seed.blob),
        "meta": seed.meta,
        "known": asdict(seed.known),
    }
    is_new = not tensors.exists()
    try:
        _write(tensors, seed.blob)
        if _is_later(folder, seed):  # this learner stalled on the way
            tensors.unlink()
            return
        _write(place / POINTER, json.dumps(pointer).encode())
    except OSError:
        if is_new:
            tensors.unlink(missing_ok=True)
        raise
    for file in place.iterdir():
        if file.name not in (tensors.name, POINTER):
            file.unlink(missing_ok=True)


def set_aside(folder: Path, run: str, token: int) -> None:
    """Move a copy out of the way of a learner that holds the run now, where it is of a later one.

    So it is where the server was restored from data older than the copy.

    Args:
        folder: the run's.
        run: its id.
        token: of the lease.

    Raises:
        OSError: it cannot be moved.
    """
    with contextlib.suppress(StoreError):
        pointer = _pointer(folder)
        if pointer is not None and pointer["run"] == run and pointer["token"] > token:
            aside = folder / f"{FOLDER}-{pointer['token']}"
            (folder / FOLDER).rename(aside)
            log.warning(
                "%s: the server's data is older than the copy of update %d, which was moved to %s",
                run,
                pointer["meta"]["updates"],
                aside,
            )


def read(folder: Path) -> Seed | None:
    """The copy in a run's folder; None if there is none.

    Raises:
        StoreError: it is damaged.
    """
    pointer = _pointer(folder)
    if pointer is None:
        return None
    path = folder / FOLDER / pointer["tensors"]
    try:
        blob = path.read_bytes()
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be read ({error.strerror}); the copy of the checkpoint is no use"
        ) from None
    if len(blob) != pointer["bytes"] or zlib.crc32(blob) != pointer["crc32"]:
        raise StoreError(
            f"{path}: damaged, {len(blob)} bytes; the copy of the checkpoint is no use, remove it"
        )
    return Seed(pointer["run"], pointer["token"], Known(**pointer["known"]), pointer["meta"], blob)


def find(client: Redis, name: str, folder: Path) -> str:
    """The id of a run on the server, as `runs.resolve` finds it, or else of one whose copy is in its folder.

    Args:
        client: connection to the server.
        name: of the run, or its beginning.
        folder: of the runs' folders.

    Raises:
        UnknownRunError: there is none, or there are several copies of such a name.
    """
    try:
        return runs.resolve(client, name)
    except UnknownRunError as error:
        found = [path.parent.parent.name for path in folder.glob(f"*/{FOLDER}/{POINTER}")]
        matches = [run for run in found if run == name] or [run for run in found if run.startswith(name)]
        if len(matches) != 1:
            raise UnknownRunError(f"{error}; nor is there a copy of its checkpoint below {folder}") from None
        return matches[0]


def bring_back(client: Redis, name: str, folder: Path) -> str:
    """The id of a run on the server; where the server lacks it, it is planted from its folder's copy, and that said.

    Args:
        client: connection to the server.
        name: of the run, or its beginning.
        folder: of the runs' folders.

    Raises:
        UnknownRunError: there is neither.
    """
    run = find(client, name, folder)
    if runs.status(client, run) is None:
        plant(client, run, folder / run, deleted_too=True)
    return run


def plant(
    client: Redis, run: str, folder: Path, held: Seed | None = None, *, deleted_too: bool = False
) -> bool:
    """Put a run back onto a server that has lost it, and say so; False if somebody else has, or it went again.

    Args:
        client: connection to the server.
        run: its id.
        folder: the run's.
        held: by the learner that had the run; the folder's copy goes before it if a later learner wrote that.
        deleted_too: plant it even where it was deleted on purpose.

    Raises:
        UnknownRunError: neither a seed is held nor is a copy in the folder.
        StoreError: the run was deleted on purpose, or the copy is damaged.
    """
    seed = held
    if held is None or _is_later(folder, held):
        seed = read(folder)
    if seed is None or seed.run != run:
        place = folder / FOLDER
        raise UnknownRunError(f"run {run}: not on this server, and no copy of its checkpoint is in {place}")
    if not seeds.plant(client, seed, deleted_too=deleted_too):
        return False
    log.warning(
        "%s: the server came without it; re-seeded from %s at update %d: what was appended later, replay, weights, "
        "evaluations, figures and journal of before are lost",
        run,
        "the learner" if seed is held else folder / FOLDER,
        seed.meta["updates"],
    )
    return True


def _is_later(folder: Path, held: Seed) -> bool:
    """Whether the copy in a folder is of a learner that took over from the one that holds a seed."""
    with contextlib.suppress(StoreError):
        pointer = _pointer(folder)
        return pointer is not None and pointer["run"] == held.run and pointer["token"] > held.token
    return False


class Copier:
    """Writes copies in a thread of its own: a disk that hangs must not cost the lease.

    Args:
        folder: the run's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next: Seed | None = None
        self._changed = threading.Condition()
        self._closing = False
        self._failed = ""
        self._thread: threading.Thread | None = None

    def put(self, seed: Seed) -> None:
        """Have a seed written soon; one that still waits is replaced."""
        with self._changed:
            self._next = seed
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="copier", daemon=True)
                self._thread.start()

    def close(self, timeout_s: float = 30.0, *, discard: bool = False) -> None:
        """Wait until what was put is written, or cannot be, or is discarded."""
        with self._changed:
            self._closing = True
            if discard:
                self._next = None
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._next is None and not self._closing:
                    self._changed.wait()
                seed, self._next = self._next, None
            if seed is None:
                return
            self._write(seed)

    def _write(self, seed: Seed) -> None:
        try:
            write(self._folder, seed)
        except OSError as error:
            reason = error.strerror or str(error)
            if reason != self._failed:
                place = self._folder / FOLDER
                log.warning("%s: no copy of the checkpoint (%s); tried again at the next one", place, reason)
            self._failed = reason
            return
        if self._failed:
            log.info("%s: holds a copy of the checkpoint again", self._folder / FOLDER)
        self._failed = ""


def _pointer(folder: Path) -> dict[str, Any] | None:
    """What `checkpoint.json` says.

    Raises:
        StoreError: it is damaged, or of another version of ddrl.
    """
    path = folder / FOLDER / POINTER
    try:
        raw = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read ({error}); remove the folder {path.parent}") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise StoreError(
            f"{path}: not a copy that this version of ddrl reads; remove the folder {path.parent}"
        )
    return raw


def _write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
