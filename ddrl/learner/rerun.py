"""Learn a run again from its recorded stream.

In lockstep the stream, the config and the seed decide all that is learned, so that weights are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ddrl.config import LearnerConfig
from ddrl.learner.core import Core
from ddrl.learner.ledger_rows import LedgerRows
from ddrl.learner.publisher import decode_tensors
from ddrl.store import recording, runs, stream, weights
from ddrl.store.connection import Redis, StoreError


@dataclass(frozen=True)
class Rerun:
    """The result of learning a run again.

    Attributes:
        updates, env_steps: made and taken.
        equal: the versions whose weights are the same, of those that the server keeps, in order.
        differs: the next one, of so many `updates`, whose weights are not; no more is learned then. None: all are.
        unreached: versions that are kept and were not compared.
    """

    updates: int
    env_steps: int
    equal: list[int]
    differs: int | None = None
    unreached: int = 0


def rerun(
    client: Redis,
    run: str,
    folder: Path | None,
    on_update: Callable[[int, int], None] = lambda done, total: None,
) -> Rerun:
    """Learn a run again, and compare each version that the server keeps; nothing is written.

    Args:
        client: connection to the server.
        run: its id.
        folder: a recording of its stream; None: the server has all of it.
        on_update: called with the updates made, and those of the newest version.

    Raises:
        StoreError: the run did not learn in lockstep, or its stream has lost its beginning.
        ConfigError: this machine cannot learn it.
    """
    config = runs.config(client, run)
    _check(run, config.learner, runs.state(client, run))
    published = sorted(weights.index(client, run).published.items())
    known = {updates: version for version, (_, updates) in published if updates is not None}
    last = max(known, default=0)
    core = Core(client, run, config)
    algorithm, replay, rows = core.algorithm, core.replay, LedgerRows()
    if (initial := runs.initial(client, run)) is not None:
        algorithm.load_initial_weights(decode_tensors(initial))
    env_steps, equal, others = 0, list[int](), list[int]()

    def compare() -> bool:
        """Compare the weights with those of the version of so many updates, if there is one; return if they differ."""
        version = known.pop(algorithm.num_updates, -1)
        if (blob := weights.get(client, run, version)) is not None:
            stored, own = weights.decode_weights(blob), algorithm.weights()
            is_equal = all(np.array_equal(stored[name], own[name].numpy(), equal_nan=True) for name in own)
            (equal if is_equal else others).append(version)
        return bool(others)

    try:
        differs = compare()
        for entry in map(core.decode, _entries(client, run, folder)):
            if differs or algorithm.num_updates >= last:
                break
            if not (entry.reason or rows.objection(entry)):
                core.admit(entry, version=0)
                env_steps += entry.played.num_transitions if entry.played else 0
            rows.count(entry, consumed=not entry.reason)
            while not differs and algorithm.num_updates < last:
                batch = replay.draw(num_steps=env_steps, num_updates=algorithm.num_updates, version=0)
                if batch is None:
                    break
                core.learn(batch)
                differs = compare()
                on_update(algorithm.num_updates, last)
    finally:
        replay.close()
    return Rerun(algorithm.num_updates, env_steps, equal, others[0] if others else None, len(known))


def _check(run: str, learner: LearnerConfig, state: runs.RunState) -> None:
    """Refuse a run that more than its stream has decided.

    Raises:
        StoreError: names why.
    """
    if not learner.lockstep:
        reason = "did not learn in lockstep (learner.lockstep): chance decided what it learned when"
    elif state.config_version or state.revision:
        reason = "was changed while it went on (`ddrl journal` shows how), which its stream does not tell"
    elif learner.num_learners > 1:
        reason = (
            f"was learned by {learner.num_learners} learners (learner.num_learners), each by its own part"
        )
    elif state.goes_on_from:
        reason = f"began with the optimizers of {state.goes_on_from}, which its stream does not tell"
    elif state.reads:
        reason = f"has no stream of its own, but that of {state.reads}"
    else:
        return
    raise StoreError(f"{run}: {reason}; it cannot be learned again bit for bit")


def _entries(client: Redis, run: str, folder: Path | None) -> Iterator[stream.Entry]:
    """Yield the run's experience from its beginning.

    Raises:
        StoreError: it has lost its beginning, or the folder is another run's.
    """
    found: Iterator[stream.Entry]
    if folder is not None:
        if (name := recording.run_of(folder)) != run:
            raise StoreError(f"{folder}: is a recording of {name}, not of {run}")
        found = recording.entries(folder)
    else:
        newest = stream.newest(client, run, 1)
        pages = stream.pages(client, run, b"0-0", newest[0].entry_id if newest else b"0-0")
        found = (entry for page in pages for entry in page)
    expected = 1
    for entry in found:
        if entry.counted and entry.counted[0] != expected:
            where = folder or "the server"
            raise StoreError(
                f"{run}: {where} lacks fragment {expected:,}; keep all of a run's: replay.retain: all, or `ddrl record`"
            )
        expected += 1
        yield entry
