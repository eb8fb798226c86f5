"""Episodes spread over the fleet: the same result as played here, sooner.

Seeds go out in chunks as requests (`store/requests.py`), with the task that plays the run's own evaluations. What is
silent for too long is sent again; what fails, or is left when the fleet goes away, is played here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddrl import envs
from ddrl.cli.output import Client, note
from ddrl.config import EnvConfig
from ddrl.envs import versions
from ddrl.policy import LoadedPolicy
from ddrl.runs import evaluation
from ddrl.store import connection, requests, workers
from ddrl.store.requests import Answer, Request

POLL_S = 0.1
SURVEY_S = 2.0  # between two looks at the heartbeats
OVERDUE_S = 60.0  # a request without a sign of life is sent again after this

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Job:
    """What is to be played.

    Attributes:
        loaded: the policy.
        env: what it plays, with `noop_max` applied.
        seeds: one per episode.
        num_envs: episodes side by side in one process.
        epsilon: share of random actions.
        noop_max: as asked for; None: the run's.
    """

    loaded: LoadedPolicy
    env: EnvConfig
    seeds: range
    num_envs: int
    epsilon: float
    noop_max: int | None


@dataclass(frozen=True)
class Played:
    """What came of it.

    Attributes:
        returns, lengths: in the order of the seeds.
        num_on_fleet: episodes that the fleet has played.
        num_processes: of the fleet, when they were sent.
    """

    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    num_on_fleet: int
    num_processes: int


Scores = dict[int, tuple[float, int]]
"""Return and length by seed."""


def play(
    job: Job, client: Client | None, *, advance: Advance, on_frame: evaluation.OnFrame | None = None
) -> Played:
    """Play all episodes, on the fleet where there is one.

    Args:
        job: what is to be played.
        client: connection to the run's server; None: play here.
        advance: called with the number of episodes that were finished since.
        on_frame: called with pictures of the first episode, which is then played here.

    Raises:
        EnvError: the environment cannot be made or filmed here, though it would have to be.
    """
    scores: Scores = {}
    num_processes = 0
    if on_frame is not None:
        scores |= _here(job, job.seeds[:1], advance=advance, on_frame=on_frame)
    num_filmed = len(scores)
    if client is not None and len(scores) < len(job.seeds):
        num_processes = _on_fleet(job, client, job.seeds[num_filmed:], scores, advance)
    num_on_fleet = len(scores) - num_filmed
    left = [seed for seed in job.seeds if seed not in scores] if scores else job.seeds
    if left:
        scores |= _here(job, left, advance=advance)
    returns, lengths = zip(*(scores[seed] for seed in job.seeds), strict=True)
    return Played(returns, lengths, num_on_fleet, num_processes)


def _here(
    job: Job, seeds: Sequence[int], *, advance: Advance, on_frame: evaluation.OnFrame | None = None
) -> Scores:
    result = evaluation.evaluate(
        job.loaded.policy,
        job.env,
        job.loaded.spaces,
        seeds,
        num_envs=min(job.num_envs, len(seeds)),
        policy_version=job.loaded.version,
        epsilon=job.epsilon,
        on_episode=lambda *_: advance(1),
        on_frame=on_frame,
    )
    return dict(zip(seeds, zip(result.returns, result.lengths, strict=True), strict=True))


def _on_fleet(job: Job, client: Client, seeds: range, scores: Scores, advance: Advance) -> int:
    """Fill in the scores that the fleet gives; the number of its processes, 0 where there is none."""
    from ddrl import celery  # here: who plays a file needs no broker

    queue = envs.queue_for(celery.EVALUATE, job.env.id, versions.custom_network(job.loaded.config))
    try:
        num_processes = _processes(client, queue)
        if not num_processes:
            return 0
        size = max(1, min(job.num_envs, -(-len(seeds) // num_processes)))
        chunks = [seeds[begin : begin + size] for begin in range(0, len(seeds), size)]
        wanted = {
            number: Request(job.loaded.version, chunk[0], len(chunk), len(chunk), job.epsilon, job.noop_max)
            for number, chunk in enumerate(chunks)
        }
        gathering = _Gathering(client, job.loaded.run, queue, wanted, scores, advance, celery.send_evaluation)
        try:
            gathering.gather()
        finally:
            with contextlib.suppress(*connection.UNREACHABLE):
                requests.withdraw(client, job.loaded.run, gathering.name)
    except connection.UNREACHABLE:
        note("the server does not answer any more; playing the rest here")
        return 1 if scores else 0
    return num_processes


def _processes(client: Client, queue: str) -> int:
    return sum(worker.processes for worker in workers.alive(client) if queue in worker.queues)


class _Gathering:
    """One set of requests, from sending to the last answer.

    Args:
        client: connection to the run's server.
        run: its id.
        queue: where the evaluation tasks of its environment wait.
        wanted: requests by number.
        scores: where answers go.
        advance: is told how many episodes came in.
        send: sends a task with (run, request id, queue).
    """

    def __init__(
        self,
        client: Client,
        run: str,
        queue: str,
        wanted: dict[int, Request],
        scores: Scores,
        advance: Advance,
        send: Callable[[str, str, str], None],
    ) -> None:
        self._send_task = send
        self._client, self._run, self._queue = client, run, queue
        self._scores, self._advance = scores, advance
        self.name = requests.new_name()
        self._open = dict(wanted)
        self._heard: dict[int, tuple[str, float]] = {}  # last sign of life, and when it was new
        self._num_answers = 0

    def gather(self) -> None:
        """Send all, and take answers until none is open or nobody is there to answer."""
        self._send(list(self._open))
        survey_at = time.monotonic() + SURVEY_S
        while True:
            for given in requests.answers(self._client, self._run, self.name, self._num_answers):
                self._num_answers += 1
                self._take(given)
            if not self._open:
                return
            if time.monotonic() >= survey_at:
                if not _processes(self._client, self._queue):
                    note("the fleet has gone; playing the rest here")
                    return
                self._survey()
                survey_at = time.monotonic() + SURVEY_S
            time.sleep(POLL_S)

    def _take(self, given: Answer) -> None:
        """Count an answer once, whoever gave it; a failed one leaves its episodes to be played here."""
        wanted = self._open.pop(given.number, None)
        if wanted is None:
            return
        if given.error or not len(given.returns) == len(given.lengths) == wanted.num_episodes:
            note(
                f"a worker cannot play these episodes ({given.error or 'their number is wrong'}); playing them here"
            )
            return
        self._scores.update(zip(wanted.seeds, zip(given.returns, given.lengths, strict=True), strict=True))
        self._advance(wanted.num_episodes)

    def _survey(self) -> None:
        """Send again what nobody seems to play."""
        now = time.monotonic()
        for number, sign in requests.look(self._client, self._run, self.name).items():
            if number in self._open and self._heard[number][0] != sign:
                self._heard[number] = (sign, now)
        self._send([number for number in self._open if now - self._heard[number][1] >= OVERDUE_S])

    def _send(self, numbers: Sequence[int]) -> None:
        if not numbers:
            return
        requests.put(self._client, self._run, self.name, {number: self._open[number] for number in numbers})
        for number in numbers:
            self._heard[number] = ("", time.monotonic())
            self._send_task(self._run, requests.request_id(self.name, number), self._queue)
