"""Versions of weights that the processes of a machine share: one fetches a version, the others read its file.

Files are in the user's runtime folder, which usually is memory. They are named by the time of publication too: a server
that has lost versions may publish others of the same numbers.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from pathlib import Path

from ddrl.store import connection, weights
from ddrl.store.connection import Redis, StoreError
from ddrl.store.server import try_lock, unlock

KEEP_S = 10.0  # a file after it was written; whoever comes later fetches the version again
WAIT_S = 2.0  # for another process to fetch a version
POLL_S = 0.005
CHECKSUM_BYTES = 4


def get(client: Redis, run: str, version: int) -> bytes | None:
    """Return the safetensors bytes of a version, or None if it was dropped."""
    published_ms = weights.published_ms(client, run, version)
    if published_ms is not None:
        with contextlib.suppress(OSError, StoreError):  # such as of a folder that is another's
            return _shared(client, run, version, f"{run}-{version}-{published_ms}")
    return weights.get(client, run, version)


def _shared(client: Redis, run: str, version: int, name: str) -> bytes | None:
    folder = connection.runtime_dir() / "weights"
    folder.mkdir(mode=0o700, exist_ok=True)
    path, deadline = folder / name, time.monotonic() + WAIT_S
    while (found := _read(path)) is None and time.monotonic() < deadline:
        if (lock := try_lock(folder / f"{run}.lock")) is None:
            time.sleep(POLL_S)
            continue
        try:
            # Another process may have written it meanwhile.
            if (found := _read(path)) is None and (found := weights.get(client, run, version)) is not None:
                with contextlib.suppress(OSError):  # such as of a full disk
                    _write(path, found)
            return found
        finally:
            unlock(lock)
    return weights.get(client, run, version) if found is None else found


def _read(path: Path) -> bytes | None:
    """Return the bytes of a file, or None if there is none, or it is not as it was written."""
    try:
        with path.open("rb") as file:
            checksum, data = file.read(CHECKSUM_BYTES), file.read()
    except FileNotFoundError:
        return None
    return data if checksum == _checksum(data) else None


def _write(path: Path, data: bytes) -> None:
    """Delete older files, and write one at once."""
    oldest = time.time() - KEEP_S
    for other in path.parent.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if other.suffix != ".lock" and other.stat().st_mtime < oldest:
                other.unlink()
    draft = path.with_name(f".{path.name}")
    try:
        with draft.open("wb") as file:
            file.writelines([_checksum(data), data])
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _checksum(data: bytes) -> bytes:
    return zlib.adler32(data).to_bytes(CHECKSUM_BYTES, "big")
