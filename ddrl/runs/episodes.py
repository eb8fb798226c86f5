"""The episodes in a run's stream, and playing one again: from its recorded seed, by its recorded actions.

Where an episode begins without a seed of its own, random numbers go on: it is reached through those before it of the
same lane, from the newest seed, as long as the stream holds them. Only short episodes do (`envs.wrappers.SEED_STEPS`),
and ALE games, which have one seed for each lane of a process.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ddrl import codec, envs
from ddrl.config import EnvConfig
from ddrl.envs import requirements
from ddrl.runs.evaluation import Film, OnFrame, is_atari
from ddrl.runs.fragments import headers
from ddrl.store import runs, stream
from ddrl.store.connection import Redis, StoreError
from ddrl.types import Fragment

MOST_BYTES = 2**26  # of fragments that are kept decoded
LAST = "ddrl last observation"
COLUMNS = ("reset_index", "reset_seed", "episode_return", "episode_length")


class Place(NamedTuple):
    """A row of a producer's play: its fragment, and a row of that, counted from the first one that is no context."""

    seq: int
    row: int


@dataclass(frozen=True)
class Episode:
    """An episode that lies in the stream whole.

    Attributes:
        producer, lane: who played it.
        begin: of its first observation; `end`: of the row after its last step, where the next one begins.
        seed: of its reset; -1: the random numbers of the episode before went on.
        seeded, start: the newest reset with a seed at or before it, if the stream has all since then, and that seed.
        host: where it was played.
        first_version, last_version: of the weights.
        episode_return: unscaled.
        length: in agent steps.
        at_s: when its end was appended, by the server's clock.
        entries: fragments from `seeded`, or else from `begin`, to its end: seq -> id in the stream.
    """

    producer: int
    lane: int
    begin: Place
    end: Place
    seed: int
    seeded: Place | None
    start: int
    host: str
    first_version: int
    last_version: int
    episode_return: float
    length: int
    at_s: float
    entries: Mapping[int, bytes]

    @property
    def name(self) -> str:
        """Producer, lane, and where it begins: the fragment's number and the row."""
        return f"{self.producer}-{self.lane}-{self.begin.seq}-{self.begin.row}"


@dataclass
class _Lane:
    """The beginning of the episode that a lane plays, and the lane's newest seed."""

    begin: Place | None = None
    seed: int = -1
    version: int = 0
    seeded: Place | None = None
    start: int = -1


@dataclass
class _Producer:
    """The newest fragment of a producer, its lanes, and the entries of its fragments since the last gap."""

    incarnation: int = -1
    seq: int = -2
    lanes: dict[int, _Lane] = field(default_factory=dict)
    entries: dict[int, bytes] = field(default_factory=dict)


def read(client: Redis, run: str) -> Iterator[Episode]:
    """Yield the episodes that lie in the stream whole, in the order of their ends."""
    known: dict[int, _Producer] = defaultdict(_Producer)
    for entry, header, columns in headers(client, run, COLUMNS):
        if len(columns) == len(COLUMNS):  # earlier versions recorded no seeds
            yield from _read(known[entry.producer], entry, header, columns)


def in_order(found: Iterable[Episode]) -> list[Episode]:
    """Return episodes sorted so that each goes on where the one before it ended, for a `Replayer`."""
    return sorted(found, key=lambda one: (one.producer, one.lane, one.begin))


def _read(
    producer: _Producer, entry: stream.Entry, header: Mapping[str, Any], columns: Mapping[str, np.ndarray]
) -> Iterator[Episode]:
    """Yield the episodes that end in a fragment."""
    incarnation, seq, version = header["incarnation"], header["seq"], header["policy_version"]
    if (incarnation, seq) != (producer.incarnation, producer.seq + 1):  # some have left the stream
        producer.lanes, producer.entries = {}, {}
    producer.incarnation, producer.seq, producer.entries[seq] = incarnation, seq, entry.entry_id
    resets = zip(columns["reset_index"].tolist(), columns["reset_seed"].tolist(), strict=True)
    ended = iter(zip(columns["episode_return"].tolist(), columns["episode_length"].tolist(), strict=True))
    for (row, lane), seed in resets:
        place, state = Place(seq, row - header["C"]), producer.lanes.setdefault(lane, _Lane())
        # The first row of all ends no episode.
        if place != (0, 0) and (found := next(ended, None)) is not None and state.begin is not None:
            first = (state.seeded or state.begin).seq
            yield Episode(
                producer=entry.producer,
                lane=lane,
                begin=state.begin,
                end=place,
                seed=state.seed,
                seeded=state.seeded,
                start=state.start,
                host=header["host"],
                first_version=state.version,
                last_version=version,
                episode_return=found[0],
                length=found[1],
                at_s=stream.order(entry.entry_id)[0] / 1e3,
                entries={one: producer.entries[one] for one in range(first, seq + 1)},
            )
        state.begin, state.seed, state.version = place, seed, version
        if seed >= 0:
            state.seeded, state.start = place, seed
    needed = min(((lane.seeded or lane.begin or place).seq for lane in producer.lanes.values()), default=seq)
    for old in [one for one in producer.entries if one < needed]:
        del producer.entries[old]


@dataclass(frozen=True)
class Replayed:
    """The result of playing an episode again.

    Attributes:
        steps: played again, those of episodes before it included.
        difference: the first one from what was recorded; "" if there is none.
    """

    steps: int
    difference: str = ""


class Steps(NamedTuple):
    """Steps as the environment gave them: T of each, and the observation after the last."""

    observation: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    last: np.ndarray


class Replayer(contextlib.AbstractContextManager["Replayer"]):
    """Plays episodes of a run again, and compares each observation, reward and end with the recorded ones, bit for bit.

    Args:
        client: connection to the server.
        run: its id.
        on_frame: called with pictures of the episodes, as of `evaluation.score`.

    Raises:
        EnvError: the environment cannot be made or filmed here.
    """

    def __init__(self, client: Redis, run: str, on_frame: OnFrame | None = None) -> None:
        self._client, self._run = client, run
        config, self._spaces = runs.config(client, run), runs.spaces(client, run)
        self._env = config.env.model_copy(update={"num_envs": 1})
        self._film = None if on_frame is None else Film(self._env, self._spaces, on_frame)
        self._played: Any
        if self._spaces.is_two_player:
            raise envs.EnvError(
                f"{self._env.id}: is a game of two, which cannot be played again: the stream has one side's moves only"
            )
        if is_atari(self._env):
            self._played = _Game(self._env)
        else:
            self._played = self._film.make() if self._film else envs.make_one(self._env)
        self._fragments: OrderedDict[bytes, Fragment] = OrderedDict()  # read last
        self._num_bytes = 0  # of these
        # Producer and lane of the episode that was played last, and its end.
        self._ended: tuple[int, int, Place] | None = None
        self._seen = np.zeros(0)  # the observation after it

    def __exit__(self, *_: object) -> None:
        """Close the environment."""
        self._played.close()

    def play(self, episode: Episode, on_steps: Callable[[Steps], None] | None = None) -> Replayed:
        """Play an episode again; the one after that of the same lane goes on from there.

        Args:
            episode: one of `read`.
            on_steps: called with its steps in each fragment that were the same.

        Raises:
            StoreError: it has left the stream since, or no reset with a seed is left there.
        """
        if episode.seeded is None:
            raise StoreError(
                f"episode {episode.name} of {self._run}: its random numbers began before what the stream still holds"
            )
        num_steps, played, film = 0, self._played, self._film
        dtype = played.observation_space.dtype
        start, goes_on = episode.seeded, (episode.producer, episode.lane, episode.begin) == self._ended
        if goes_on and episode.seed < 0:
            start, seen = episode.begin, self._next(self._seen)
        else:
            seen = played.reset(seed=episode.start)[0]
        self._ended = None
        for part in self._parts(episode, start):
            steps = len(part.action)
            observed = np.empty((steps + 1, *self._spaces.observation_shape), dtype)
            rewards: list[float] = []
            is_cut_at, ended = part.truncated.copy(), (part.terminated | part.truncated).tolist()
            other_end = ""
            observed[0] = seen
            for step, action in enumerate(part.action):
                if film and part.first + step >= part.begin:
                    film.take(played, observed[step])
                seen, gained, is_over, is_cut, info = played.step(action)
                rewards.append(gained)
                last = seen
                if is_over or is_cut or ended[step]:
                    last = info.get(LAST, np.array(seen))  # a copy: the reset may write into the same array
                    is_cut_at[step] = is_cut
                    for name, here in (("terminated", is_over), ("truncated", is_cut and not is_over)):
                        there = getattr(part, name)[step]
                        if here != there and not other_end:
                            other_end = f"step {num_steps + step}: {name} is {here} here, {there} recorded"
                    if other_end:
                        break
                    if not (part.is_last and step == steps - 1):
                        seen = self._next(seen)
                observed[step + 1] = seen
            reward = np.array(rewards, np.float64)  # as a vector of environments returns them
            learned = envs.training_reward(self._env, reward)
            for name, values in (("observation", observed), ("reward", learned)):
                if difference := _difference(values[: step + 1], getattr(part, name)[: step + 1]):
                    text = f"step {num_steps + difference[0]}: {name}{difference[1]}"
                    return Replayed(num_steps + step + 1, text)
            if other_end:
                return Replayed(num_steps + step + 1, other_end)
            num_steps += steps
            if part.final is not None and (difference := _difference(last[None], part.final[None])):
                return Replayed(num_steps, f"last observation{difference[1]}")
            if on_steps and (own := max(0, part.begin - part.first)) < steps:
                ends = part.terminated[own:], is_cut_at[own:]
                on_steps(Steps(observed[own:-1], part.action[own:], reward[own:], *ends, last))
        if film:
            film.take(played, last)
        self._ended, self._seen = (episode.producer, episode.lane, episode.end), seen
        return Replayed(num_steps)

    def _next(self, seen: np.ndarray) -> np.ndarray:
        """Return the first observation of an episode whose random numbers go on; a game has begun it by itself."""
        if isinstance(self._played, _Game):
            return seen
        first: np.ndarray = self._played.reset()[0]
        return first

    def _parts(self, episode: Episode, start: Place) -> Iterator[_Part]:
        """Yield the steps from a place, at or before the episode's beginning, to its end.

        Raises:
            StoreError: a fragment has left the stream since.
        """
        lane, first, begin = episode.lane, 0, 2**62
        for seq, entry_id in episode.entries.items():
            if seq < start.seq:
                continue
            fragment = self._fragment(episode, entry_id)
            last = episode.end.row if seq == episode.end.seq else fragment.num_steps
            rows = range(start.row if seq == start.seq else 0, last)
            if not rows:
                continue
            if begin == 2**62 and (seq, rows[-1]) >= episode.begin:
                begin = first + max(0, episode.begin.row - rows[0] if seq == episode.begin.seq else 0)
            part = slice(fragment.context + rows[0], fragment.context + rows[-1] + 1)
            final = None
            if fragment.truncated[part.stop - 1, lane]:
                [[place]] = np.argwhere((fragment.final_index == (part.stop - 1, lane)).all(axis=1))
                final = fragment.final_observation[place]
            names = ("observation", "action", "reward", "terminated", "truncated")
            columns = {name: getattr(fragment, name)[part, lane] for name in names}
            yield _Part(first, begin, **columns, final=final, is_last=seq == episode.end.seq)
            first += len(rows)

    def _fragment(self, episode: Episode, entry_id: bytes) -> Fragment:
        """Return a fragment; the lanes of one are asked for one after another."""
        if entry_id not in self._fragments:
            found = stream.read(self._client, self._run, stream.before(entry_id), count=1, until=entry_id)
            if not found:
                raise StoreError(f"episode {episode.name} of {self._run}: has left the stream meanwhile")
            self._fragments[entry_id] = codec.decode(found[0].fields)
            self._num_bytes += self._fragments[entry_id].num_bytes
            while len(self._fragments) > 1 and self._num_bytes > MOST_BYTES:
                self._num_bytes -= self._fragments.popitem(last=False)[1].num_bytes
        self._fragments.move_to_end(entry_id)
        return self._fragments[entry_id]


class _Part(NamedTuple):
    """A lane's steps in one fragment: T of them, with what was recorded before and at each.

    Attributes:
        first: number of the first step; `begin`: of the step with which the episode itself begins.
        observation: [T, *O] before each step. action: [T, *A].
        reward, terminated, truncated: [T], as learned from.
        final: [*O] the last observation, where the last step was truncated.
        is_last: the episode ends with it.
    """

    first: int
    begin: int
    observation: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    final: np.ndarray | None
    is_last: bool


class _Game:
    """A lane of ALE games as one environment that begins anew by itself, in which a lost life is an end."""

    def __init__(self, env: EnvConfig) -> None:
        self._vector = envs.make_vector(env)
        self.observation_space = self._vector.single_observation_space

    def reset(self, *, seed: int) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin a game."""
        return self._vector.reset(seed=[seed])[0][0], {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Take a step; the observation after a game is the first one of the next, and the info has its own."""
        observation, reward, terminated, truncated, info = self._vector.step(action[None])
        is_lost = info.get("life_lost", terminated)[0]
        last = {LAST: info["final_obs"][0]} if "final_obs" in info else {}
        return observation[0], reward[0], terminated[0] or is_lost, truncated[0], last

    def close(self) -> None:
        """Close the games."""
        self._vector.close()


def _difference(here: np.ndarray, recorded: np.ndarray) -> tuple[int, str] | None:
    """Return the first row in which two arrays differ in a bit, and how; None if none does."""
    here, recorded = here.astype(recorded.dtype, order="C"), np.ascontiguousarray(recorded)
    if here.tobytes() == recorded.tobytes():
        return None
    are_same = here.view(np.uint8).reshape(len(here), -1) == recorded.view(np.uint8).reshape(len(here), -1)
    row = int(np.argmin(are_same.all(axis=1)))
    where = np.argwhere(here[row] != recorded[row]) if here[row].ndim else np.zeros((1, 0), np.int64)
    place = tuple(where[0].tolist()) if len(where) else ()
    name = f"[{', '.join(map(str, place))}]" if place else ""
    return row, f"{name} is {here[row][place]} here, {recorded[row][place]} recorded"


def other_versions(client: Redis, run: str) -> dict[str, tuple[str, str]]:
    """Return the packages that differ: name -> version with which the run was submitted, and the one here."""
    here = requirements.run_versions(runs.config(client, run))
    known = runs.state(client, run).versions
    return {name: (was, here.get(name, "none")) for name, was in known.items() if here.get(name) != was}
