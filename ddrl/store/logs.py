"""Lines of log that concern a run, from learners and workers wherever they are; capped."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import queue
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from ddrl.store import connection, journal, keys

if TYPE_CHECKING:
    from redis import Redis

LENGTH = 5_000
LINE_LENGTH = 2_000
MOST_WAITING = 1_000  # lines, while the server does not answer; what comes then is said here only
PARTING_S = 2.0  # for the last lines; longer where the server does not answer


def add(client: Redis, run: str, source: str, level: str, text: str) -> None:
    """Append a line; nothing where the run is gone.

    Args:
        client: connection to the server.
        run: whose log.
        source: who says so, such as "learner gpu1".
        level: as `logging` names it.
        text: cut at LINE_LENGTH.
    """
    row = {"source": source, "level": level, "text": text[:LINE_LENGTH]}
    journal.add(client, run, keys.logs(run), length=LENGTH, **row)


def read(client: Redis, run: str, after: bytes = b"0-0") -> tuple[list[dict[str, Any]], bytes]:
    """Lines after an entry, oldest first: time_s (server's clock), source, level, text; and the last entry's id."""
    return journal.read(client, keys.logs(run), after)


class Handler(logging.Handler):
    """Sends what is logged in this process to a run's log; what the server does not take is not said there.

    Args:
        client: a connection of its own, with timeouts short enough for whoever logs.
        run: whose log.
        source: of the lines.
    """

    def __init__(self, client: Redis, run: str, source: str) -> None:
        super().__init__(logging.INFO)
        self._client, self._run, self._source = client, run, source

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record; never raises."""
        try:
            add(self._client, self._run, self._source, record.levelname, record.getMessage())
        except (RedisError, OSError):
            pass
        except Exception:  # of a malformed record
            self.handleError(record)


class _Queuing(logging.handlers.QueueHandler):
    def enqueue(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            super().enqueue(record)


@contextlib.contextmanager
def sending(run: str, source: str) -> Iterator[None]:
    """What ddrl logs while the context lasts goes to a run's log, sent by a thread of its own: nobody waits for it.

    Args:
        run: whose log.
        source: of the lines.
    """
    client = connection.connect()
    sender = Handler(client, run, source)
    lines: queue.Queue[logging.LogRecord | None] = queue.Queue(MOST_WAITING)
    over = threading.Event()

    def send() -> None:
        while not (over.is_set() and lines.empty()):
            with contextlib.suppress(queue.Empty):
                record = lines.get(timeout=1.0)
                if record is not None:
                    sender.handle(record)
        client.close()

    thread = threading.Thread(target=send, name="logs", daemon=True)
    handler = _Queuing(lines)
    handler.setLevel(logging.INFO)
    thread.start()
    logging.getLogger("ddrl").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("ddrl").removeHandler(handler)
        over.set()
        with contextlib.suppress(queue.Full):
            lines.put_nowait(None)  # so that it looks
        thread.join(PARTING_S)
