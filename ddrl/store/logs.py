"""Log lines of a run, from its learners and workers; capped."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import queue
import threading
from collections.abc import Iterator
from typing import Any, cast

from redis import Redis

from ddrl.store import capped_streams, connection, keys

LENGTH = 5_000
LINE_LENGTH, SOURCE_LENGTH = 2_000, 100
MOST_WAITING = 1_000  # lines, while the server does not answer; further ones are dropped
PARTING_S = 2.0  # at most, for the last lines


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
    lengths = {"source": SOURCE_LENGTH, "level": SOURCE_LENGTH, "text": LINE_LENGTH}
    rows, last_id = capped_streams.read(client, keys.logs(run), after, *lengths)
    # A worker may write longer ones.
    cut = [row | {name: row[name][:most] for name, most in lengths.items()} for row in rows[-LENGTH:]]
    return cut, last_id


class _QueueHandler(logging.handlers.QueueHandler):
    def enqueue(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            super().enqueue(record)


class _QueueListener(logging.handlers.QueueListener):
    """Sends records of this process to a run's log; those that the server does not take are dropped."""

    def __init__(self, lines: queue.Queue[Any], client: Redis, run: str, source: str) -> None:
        super().__init__(lines)
        self._log = client, run, source

    def handle(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):  # of the server, or of a text that cannot be encoded
            add(*self._log, record.levelname, record.getMessage())

    def enqueue_sentinel(self) -> None:
        cast("queue.Queue[Any]", self.queue).put(None)  # waits while the queue is full


@contextlib.contextmanager
def sending(run: str, source: str) -> Iterator[None]:
    """Send the log of ddrl to a run's log while the context lasts, from a thread of its own.

    Args:
        run: whose log.
        source: of the lines.
    """
    client = connection.connect()
    lines: queue.Queue[logging.LogRecord | None] = queue.Queue(MOST_WAITING)
    listener, handler = _QueueListener(lines, client, run, source), _QueueHandler(lines)
    handler.setLevel(logging.INFO)
    listener.start()
    logging.getLogger("ddrl").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("ddrl").removeHandler(handler)

        def stop() -> None:
            listener.stop()
            client.close()

        stopping = threading.Thread(target=stop, name="logs", daemon=True)
        stopping.start()
        stopping.join(PARTING_S)
