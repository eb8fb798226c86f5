"""What a learner's two threads show each other: finished copies and counts, never the work in progress."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping

import torch

from ddrl.store.checkpoints import Counters

TRAILING_EPISODES = 20

Tensors = Mapping[str, torch.Tensor]


class Board:
    """Between training thread and service thread: every field is written by one of them, whole."""

    def __init__(self) -> None:
        # By the training thread.
        self.updates = self.steps = 0
        self.refilled = 0
        """Of the steps, those that the pace leaves out; see `Counters`."""
        self.counters = Counters()
        """As of the last entry admitted, all at once."""
        self.figures: Tensors = {}
        self.returns: deque[float] = deque(maxlen=TRAILING_EPISODES)
        self.refused: deque[tuple[bytes, bytes, str]] = deque()
        """(entry, head, reason) to be told."""
        self.gone: deque[str] = deque()
        """Sentences about fragments that went unread, to be told."""
        self.weights: tuple[int, Tensors] | None = None
        """(updates, parameters) to be published; the service thread takes them off when they are."""
        self.state: tuple[Counters, Tensors] | None = None
        """A checkpoint to be stored; taken off when it is."""
        # By the service thread.
        self.version = -1
        self.wants_state = threading.Event()
        self._started = time.monotonic()
        self._elapsed_before_s = 0.0

    @property
    def paced_steps(self) -> int:
        """Steps that the pace counts."""
        return self.steps - self.refilled

    @property
    def elapsed_s(self) -> float:
        """Time of learning, that of earlier learners of the run included as far as checkpoints tell."""
        return self._elapsed_before_s + time.monotonic() - self._started

    def add_elapsed(self, seconds: float) -> None:
        """Count more as time of learning; less where it is negative."""
        self._elapsed_before_s += seconds
