"""What a server that cannot serve for a while is met with: one sentence, and patience."""

from __future__ import annotations

import contextlib
import logging
import time

from redis import Redis

from ddrl.store import connection

log = logging.getLogger(__name__)


class Patience:
    """Says once that the server cannot serve, and once that it does again.

    A server whose disk was full is then asked to write its append-only file anew, where the user may. Redis 7 and
    Valkey open the file that follows a rewrite without O_APPEND: where a write failed half-way and was cut off, the
    next one leaves a hole, and the next start refuses the file ("Bad file format").

    Args:
        client: connection to the server.
    """

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._since = 0.0
        self._said = ""
        self._is_spoiled = False  # the server's append-only file, perhaps

    def bear(self, error: Exception) -> None:
        """Take an error of the server that waiting may mend; raise any other."""
        text = connection.hindrance(error)
        if text is None:
            raise error
        self._since = self._since or time.monotonic()
        if text != self._said:
            log.warning("%s; waiting for it", text)
        self._said = text
        self._is_spoiled |= text == connection.DISK_FULL

    def over(self) -> None:
        """The server has served."""
        if self._since:
            log.info("the server serves again after %.0f s", time.monotonic() - self._since)
            if self._is_spoiled:
                with contextlib.suppress(*connection.HINDRANCES):
                    if self._client.info("persistence").get("aof_enabled"):
                        self._client.bgrewriteaof()
        self._since, self._said, self._is_spoiled = 0.0, "", False
