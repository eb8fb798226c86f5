"""Datasets of other libraries, made from a run's stream."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ddrl import envs
from ddrl.config import first_line
from ddrl.runs import episodes
from ddrl.runs.evaluation import is_atari
from ddrl.store import runs
from ddrl.store.connection import Redis, StoreError

COLUMNS = ("actions", "rewards", "terminations", "truncations")  # Minari's names, as in `episodes.Steps`
AT_ONCE = 100  # episodes that are held in memory


def write_minari(
    client: Redis, run: str, name: str, on_episode: Callable[[int, int], None]
) -> tuple[int, int, int]:
    """Write the episodes of a run's stream as a Minari dataset.

    Each is played again: the stream has no observation after the step that terminates an episode, and rewards only as
    they are learned from. So what is written is what the environment gave, and the same as what was learned from.
    Those that began after others that have left the stream are left out, as they cannot be played from their seed.

    Args:
        client: connection to the server.
        run: its id.
        name: of the dataset, such as `lander/medium-v0`, in Minari's folder of datasets.
        on_episode: called with the number of those that are done, and of all.

    Returns:
        The number of episodes written, that of their steps, and that of the episodes left out.

    Raises:
        EnvError: the environment cannot be made here.
        StoreError: there is such a dataset, the name is none, no whole episode is there, or one is not the same again.
    """
    import minari
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_dataset import parse_dataset_id
    from minari.storage.datasets_root_dir import get_dataset_path

    try:
        parse_dataset_id(name)
    except ValueError as error:
        raise StoreError(f"--minari {name}: {first_line(error)}") from None
    except TypeError:  # of Minari, where the version is missing
        raise StoreError(f"--minari {name}: lacks a version; write it like {name}-v0") from None
    if (folder := Path(get_dataset_path(name))).exists():
        raise StoreError(f"--minari {name}: there is such a dataset in {folder.parent}; name another version")
    config = runs.config(client, run)
    if is_atari(config.env):
        raise StoreError(f"run {run}: {config.env.id} is a game, whose last frames are not in the stream")
    made = envs.make_one(config.env)
    spaces = {"observation_space": made.observation_space, "action_space": made.action_space}
    is_plain = ":" not in config.env.id and not (config.env.wrappers or config.env.action_repeat > 1)
    made.close()
    dataset: Any = None
    buffers: list[EpisodeBuffer] = []
    done = num_steps = 0

    def write() -> None:
        nonlocal dataset, buffers
        if dataset is not None:
            dataset.storage.update_episodes(buffers)
        else:
            text = f"{config.algorithm['name']} of ddrl, run {run}"
            spec = made.spec if is_plain else None
            options = {"algorithm_name": config.algorithm["name"], "description": text}
            with warnings.catch_warnings(action="ignore"):  # on an author and links that nobody gave
                dataset = minari.create_dataset_from_buffers(name, buffers, env=spec, **spaces, **options)
        buffers = []

    found = [*episodes.read(client, run)]
    if not (known := episodes.in_order(one for one in found if one.seeded is not None)):
        raise StoreError(f"run {run}: the stream holds no whole episode that can be played from its seed")
    try:
        with episodes.Replayer(client, run) as replayer:
            for episode in known:
                parts: list[episodes.Steps] = []
                if difference := replayer.play(episode, parts.append).difference:
                    raise StoreError(f"run {run}: episode {episode.name} is not the same again: {difference}")
                observations, *others = map(np.concatenate, zip(*(part[:-1] for part in parts), strict=True))
                columns = dict(zip(COLUMNS, others, strict=True))
                columns["observations"] = np.concatenate([observations, parts[-1].last[None]])
                buffers.append(EpisodeBuffer(seed=episode.seed if episode.seed >= 0 else None, **columns))
                done, num_steps = done + 1, num_steps + episode.length
                if len(buffers) == AT_ONCE:
                    write()
                on_episode(done, len(known))
            if buffers:
                write()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return done, num_steps, len(found) - done
