"""Moving pictures of a run: an episode that is played anew, or the frames that its workers have just appended."""

from __future__ import annotations

import threading
import time
from io import BytesIO

import numpy as np
from PIL import Image

from ddrl import codec
from ddrl.cli.output import Client, InputError
from ddrl.policy import LoadedPolicy
from ddrl.runs import evaluation
from ddrl.store import runs, stream
from ddrl.types import EnvSpec

MAX_FRAMES, MAX_WIDTH, MIN_WIDTH = 400, 480, 168
MAX_S = 60.0  # that an episode may take to play
FRAGMENTS = 16  # of the stream that are looked at
STREAM_HZ = 15.0

_playing = threading.Lock()  # one at a time: the machine may be learning


def play(loaded: LoadedPolicy, seed: int) -> tuple[bytes, float, int]:
    """Play an episode; return it as WebP, its return and its length.

    Raises:
        InputError: another one is being played, or it takes too long.
        EnvError: the environment cannot be made or filmed here.
    """
    if not _playing.acquire(blocking=False):
        raise InputError("an episode is being played: wait until it has ended")
    try:
        began, every = time.monotonic(), 1
        frames: list[Image.Image] = []
        num, rate = 0, STREAM_HZ

        def take(picture: np.ndarray, hz: float) -> None:
            nonlocal num, every, rate
            if num % every == 0:
                frames.append(_image(picture))
            if len(frames) > MAX_FRAMES:  # a long one is shown faster
                del frames[1::2]
                every *= 2
            num, rate = num + 1, hz

        def check() -> None:
            if time.monotonic() - began > MAX_S:
                raise InputError(f"the episode from seed {seed} takes longer than {MAX_S:.0f} s to play")

        done = evaluation.score(loaded, [seed], num_envs=1, on_frame=take, on_step=check)
        return _webp(frames, rate), done.returns[0], done.lengths[0]
    finally:
        _playing.release()


def sees_images(spaces: EnvSpec) -> bool:
    """Return whether observations are images."""
    return spaces.observation_dtype == "uint8" and len(spaces.observation_shape) in (2, 3)


def newest(client: Client, run: str) -> bytes | None:
    """Return what the first environment of the newest producer has seen last, as WebP; None if there is no image."""
    if not sees_images(runs.spaces(client, run)):
        return None
    found = []
    for entry in stream.newest(client, run, FRAGMENTS):
        try:
            found.append(codec.decode(entry.fields))
        except codec.CodecError:  # the learner records it
            continue
    own = [each for each in found if each.producer == found[-1].producer]
    frames = [_image(frame) for each in own for frame in each.observation[each.context : -1, 0]]
    return _webp(frames[-MAX_FRAMES:], STREAM_HZ) if frames else None


def _image(picture: np.ndarray) -> Image.Image:
    """Return [H, W], or [H, W, C] whose last channels are shown, at a size that can be seen."""
    if picture.ndim == 3:
        picture = picture[:, :, -3:] if picture.shape[2] == 3 else picture[:, :, -1]
    image = Image.fromarray(np.ascontiguousarray(picture)).convert("RGB")
    width = min(MAX_WIDTH, max(MIN_WIDTH, image.width))
    size = width, max(1, round(image.height * width / image.width))
    return image.resize(size, Image.Resampling.NEAREST if width > image.width else Image.Resampling.BILINEAR)


def _webp(frames: list[Image.Image], hz: float) -> bytes:
    file = BytesIO()
    wait_ms = max(20, round(1e3 / hz))
    frames[0].save(
        file, "WEBP", save_all=True, append_images=frames[1:], duration=wait_ms, loop=0, quality=60, method=0
    )
    return file.getvalue()
