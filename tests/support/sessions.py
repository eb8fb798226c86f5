"""A learner without a process of its own, where a process adds nothing to a test."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest
from redis import Redis

from ddrl import celery
from ddrl.learner import run as runner
from ddrl.store import connection, keys, runs


class Learning:
    """`runner.learn` in a thread of this process, which sends workers nothing.

    Args:
        client: connection of the test.
        url: of the server.
        run: its id.
        folder: of the runs' folders.
        take_over: ask the learner that holds the run for it.
        patch: ends with the test.
    """

    def __init__(
        self,
        client: Redis,
        url: str,
        run: str,
        folder: Path,
        patch: pytest.MonkeyPatch,
        *,
        take_over: bool = False,
    ) -> None:
        patch.setenv(connection.URL_VARIABLE, url)
        patch.setattr(celery, "send_rollout", lambda *_: None)
        self.client, self.run, self.folder, self.take_over = client, run, folder, take_over
        self.interrupt = runner.Interrupt()
        self.error: Exception | None = None
        self.status: str | None = None
        self.thread = threading.Thread(target=self._learn, args=[connection.connect(url)], daemon=True)
        self.thread.start()

    def _learn(self, client: Redis) -> None:
        try:
            self.status = runner.learn(
                client, self.run, self.folder, self.interrupt, take_over=self.take_over
            )
        except Exception as error:
            self.error = error

    @property
    def state(self) -> runs.RunState | None:
        with contextlib.suppress(runs.UnknownRunError):
            return runs.state(self.client, self.run)
        return None

    def held_with(self, token: int) -> bool:
        """Whether the run is held, by whoever came after this token."""
        return self.state is not None and self.state.leased and self.fence > token

    @property
    def fence(self) -> int:
        return int(self.client.hget(keys.state(self.run), "fence") or 0)

    def end(self) -> None:
        self.interrupt.event.set()
        self.thread.join(30.0)
        assert not self.thread.is_alive()
