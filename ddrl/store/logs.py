"""Log lines of a run, from its learners and workers; capped."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from ddrl.store import capped_streams, connection, keys

if TYPE_CHECKING:
    from redis import Redis

LENGTH = 5_000
LINE_LENGTH = 2_000
MOST_WAITING = 1_000  # lines, while the server does not answer; further ones are dropped
PARTING_S = 1.0  # until the server has room for the last lines, and again until it has taken them


def add(client: Redis, run: str, source: str, level: str, text: str) -> None:
    """Append a line; nothing if the run is gone.

    Args:
        client: connection to the server.
        run: whose log.
        source: of the line, such as "learner gpu1".
        level: as `logging` names it.
        text: cut at LINE_LENGTH.
    """
    row = {"source": source, "level": level, "text": text[:LINE_LENGTH]}
    capped_streams.add(client, run, keys.logs(run), length=LENGTH, **row)


def read(client: Redis, run: str, after: bytes = b"0-0") -> tuple[list[dict[str, Any]], bytes]:
    """Return the lines after an entry, oldest first (time_s, source, level, text), and the last entry's id."""
    return capped_streams.read(client, keys.logs(run), after)


class Handler(logging.Handler):
    """Sends log records of this process to a run's log, from a thread of its own.

    Records that the server does not take are dropped.

    Args:
        client: a connection of its own.
        run: whose log.
        source: of the lines.
    """

    def __init__(self, client: Redis, run: str, source: str) -> None:
        super().__init__(logging.INFO)
        self._client, self._run, self._source = client, run, source
        self._waiting: queue.Queue[tuple[str, str] | None] = queue.Queue(MOST_WAITING)  # level and text
        self._thread = threading.Thread(target=self._send_all, name="logs", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Have a record sent; never raises, never waits."""
        try:
            self._waiting.put_nowait((record.levelname, record.getMessage()))
        except queue.Full:
            pass
        except Exception:  # of a malformed record
            self.handleError(record)

    def close(self) -> None:
        """Wait for the last lines, but not long."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=PARTING_S)
            self._thread.join(PARTING_S)
        super().close()

    def _send_all(self) -> None:
        while (line := self._waiting.get()) is not None:
            with contextlib.suppress(RedisError, OSError):
                add(self._client, self._run, self._source, *line)
        self._client.close()


@contextlib.contextmanager
def sending(run: str, source: str) -> Iterator[None]:
    """Send the log of ddrl to a run's log while the context lasts.

    Args:
        run: whose log.
        source: of the lines.
    """
    handler = Handler(connection.connect(), run, source)
    logging.getLogger("ddrl").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("ddrl").removeHandler(handler)
        handler.close()
