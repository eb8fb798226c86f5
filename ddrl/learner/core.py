"""The core of a learner, whether it leads or follows: its algorithm, and the replay of its fragments."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from ddrl.algorithms import base
from ddrl.config import RunConfig
from ddrl.learner.ledger_rows import LedgerRows
from ddrl.networks.device import set_up, to_device, to_host
from ddrl.networks.ranks import ALONE, Ranks
from ddrl.replay.experience import longest_fragment_steps, make_experience
from ddrl.replay.reader import Decoded, FragmentLimits, decode, decode_range
from ddrl.store import quarantine, runs, stream
from ddrl.store.checkpoints import REPLAY, Counters
from ddrl.store.connection import Redis

CHECK_EVERY = 1_000  # updates between two comparisons of the ranks' states
Tensors = Mapping[str, torch.Tensor]


class Core:
    """The algorithm and the replay of one learner.

    Args:
        reader_client: connection for the reader's blocking reads.
        run: its id.
        config: the run's.
        ranks: that learn together.

    Attributes:
        client: the reader's; `run`, `config`, at the beginning, and `ranks` are as given, too.
        resolved: the run's algorithm and spaces.
        device: where networks and batches live.
        source: the run whose stream it reads: the same, unless it is a shadow.
        algorithm, replay: of the run; the replay holds this rank's fragments.
        decode: decodes an entry of the stream, if it is this rank's.
        longest: bytes of a reply of the server; see `connection.bound_replies`.
        checksum: of the algorithm's state, in which all ranks should be the same; a new one after CHECK_EVERY updates.
    """

    def __init__(self, reader_client: Redis, run: str, config: RunConfig, ranks: Ranks = ALONE) -> None:
        self.client, self.run, self.config, self.ranks = reader_client, run, config, ranks
        self.device = device = set_up(config.learner)
        self.resolved = resolved = base.resolve(config, runs.spaces(reader_client, run))
        several = ranks if ranks.size > 1 else None
        self.algorithm = resolved.learner(device=device, seed=config.seed, ranks=several)
        self.algorithm.from_policy = bool(runs.state(reader_client, run).warm)
        num_envs, num_steps = config.env.num_envs, longest_fragment_steps(config.rollout, resolved.sequences)
        if resolved.on_policy:  # a batch is whole fragments
            num_steps = min(num_steps, -(-resolved.config.batch_size // num_envs))
        self.source = runs.source(reader_client, run)
        recorded = base.resolve(runs.config(reader_client, self.source), resolved.spec).context
        context = max(resolved.context, recorded)  # a shadow's source may repeat more steps, or fewer
        self.replay = make_experience(
            config, resolved.config, resolved.spec, recorded=recorded, device=device, ranks=several
        )
        limits = FragmentLimits(
            num_steps,
            num_envs,
            context,
            resolved.config.recurrent_state_size,
            resolved.sequences.stride if resolved.sequences else 1,
            len(config.env.metrics),
            *runs.value_limit(reader_client, run),
        )
        self.decode = partial(
            decode,
            run=self.source,
            spaces=resolved.spec,
            limits=limits,
            pack=self.replay.pack,
            rules=quarantine.read(reader_client, run)[0],
            ranks=(ranks.rank, ranks.size),
        )
        self.checksum = 0
        self.longest = 2 * stream.REPLY_BYTES + limits.num_bytes(resolved.spec)

    def load(self, state: Tensors, counters: Counters, version: int) -> Iterator[Decoded]:
        """Load a checkpoint: the algorithm, then its replay, from the stream as if `version` were published.

        Yields:
            The entries of the stream that the checkpoint's replay held, in order.
        """
        of_replay = {name for name in state if name.startswith(REPLAY)}
        self.algorithm.load_state({name: state[name] for name in state.keys() - of_replay})
        rows = LedgerRows()  # so that what was refused before is refused again
        oldest, cursor = counters.oldest.encode(), counters.cursor.encode()
        # On-policy, the leader counts what waits at the others.
        decode_one = partial(self.decode, counts_all=self.resolved.on_policy and self.ranks.rank == 0)
        for entry in decode_range(self.client, self.source, oldest, cursor, decode_one):
            if entry.played is not None and not rows.objection(entry):
                self.admit(entry, version=version)
            rows.count(entry, consumed=True)
            yield entry
        self.replay.load_state({name.removeprefix(REPLAY): state[name].numpy() for name in of_replay})

    def admit(self, entry: Decoded, *, version: int) -> bool:
        """Admit an entry to the replay, or what is known of another rank's; return False if it is too stale.

        One that a rule of quarantine leaves out counts as admitted.
        """
        content: Any = entry.packed or entry.played
        return entry.left_out or self.replay.admit(content, entry.entry_id, version=version)

    def learn(self, batch: Any) -> dict[str, torch.Tensor]:
        """Update the algorithm and the priorities of what was drawn; return metrics.

        Raises:
            RankLostError: another rank has ended, or does not answer.
        """
        batch, num_checks = self.replay.begin(batch), self.algorithm.num_updates // CHECK_EVERY
        metrics = dict(self.algorithm.update(to_device(batch, self.device)))
        self.ranks.settle()
        if (priority := metrics.pop("priority", None)) is not None:
            self.replay.update_priorities(batch, to_host(priority))
        if self.ranks.size > 1 and self.algorithm.num_updates // CHECK_EVERY > num_checks:
            self.checksum = 0
            for value in self.algorithm.state().values():
                if value.is_floating_point():  # generators differ
                    self.checksum = zlib.crc32(value.numpy().tobytes(), self.checksum)
        return metrics

    def replay_state(self) -> dict[str, torch.Tensor]:
        """Return the replay's part of a checkpoint."""
        return {REPLAY + name: torch.from_numpy(array) for name, array in self.replay.state().items()}

    def apply_options(self, options: Any) -> None:
        """Apply changed options of the algorithm before the next update.

        Raises:
            ValueError: one is not live; nothing is changed.
        """
        self.algorithm.apply_options(options)
        self.replay.apply_options(options)
