"""Experience as off-policy algorithms use it: kept in a view, drawn at random and many times, paced both ways."""

from __future__ import annotations

from ddrl.replay.pacing import Pacing
from ddrl.replay.samplers import uniform
from ddrl.replay.view import DenseView
from ddrl.types import Batch, Fragment


class Sampled:
    """A view with its sampler and its pace.

    Args:
        view: holds the transitions.
        pacing: who may go on.
        batch_size: B, transitions of a draw.
        seed: of the draws.
        grain: steps by which the allowance grows before collectors are told.
    """

    def __init__(self, view: DenseView, pacing: Pacing, *, batch_size: int, seed: int, grain: int) -> None:
        self.view, self._pacing = view, pacing
        self._batch_size, self._seed = batch_size, seed
        self.grain = grain
        self.players = 1  # each producer may take all that is left of the allowance
        self.num_dropped = self.num_waiting = 0
        self.first_version = 0  # what any policy played will do
        self._staleness: list[int] = []  # of the fragments admitted since the last figures

    def __len__(self) -> int:
        """Transitions held."""
        return len(self.view)

    @property
    def oldest_entry_id(self) -> bytes | None:
        """Stream entry of the oldest fragment held; None when empty."""
        oldest = self.view.oldest_entry_id
        return oldest.encode() if isinstance(oldest, str) else oldest

    def admit(self, fragment: Fragment, entry_id: bytes, *, version: int) -> None:
        """Take a fragment over.

        Args:
            fragment: as decoded.
            entry_id: its id in the stream.
            version: latest published.

        Raises:
            ValueError: it cannot be used.
        """
        self.view.admit(fragment, entry_id)
        self._staleness.append(version - fragment.policy_version)

    def draw(self, *, num_steps: int, num_updates: int, version: int) -> Batch | None:
        """The next batch of NumPy arrays, or None while the learner must wait.

        Args:
            num_steps: environment steps appended.
            num_updates: updates finished.
            version: latest published.
        """
        if not self._pacing.can_sample(num_steps, num_updates) or not len(self.view):
            return None
        index = uniform(len(self.view), self._batch_size, seed=self._seed, draw=num_updates)
        return self.view.gather(index)

    def allowance(self, *, num_steps: int, num_updates: int, version: int) -> int:
        """Collectors may append while fewer environment steps than this were appended in all."""
        return self._pacing.allowance(num_updates)

    def figures(self, *, num_steps: int, num_updates: int) -> dict[str, float]:
        """What a row of figures says of it; staleness of the fragments since the last call."""
        staleness, self._staleness = self._staleness, []
        row = {
            "samples_per_insert": num_updates * self._batch_size / self._pacing.trained_steps(num_steps),
            "replay_size": float(len(self.view)),
        }
        return row | ({"staleness": sum(staleness) / len(staleness)} if staleness else {})
