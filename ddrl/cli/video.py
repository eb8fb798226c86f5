"""A video of one episode, written by imageio."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ddrl.cli.output import InputError

SUFFIX = ".mp4"
_LEAST_SIZE = 320  # pixels; smaller pictures are enlarged, each pixel to a square


def check(path: Path) -> None:
    """Refuse a video that could not be written, before anything is played.

    Raises:
        InputError: another kind of file, a folder that is not there, or imageio is not installed.
    """
    if path.suffix.lower() != SUFFIX:
        raise InputError(f"--video {path}: is not named as a video; use a name that ends in {SUFFIX}")
    if not path.parent.is_dir() or path.is_dir() or not os.access(path.parent, os.W_OK):
        raise InputError(f"--video {path}: cannot be written; name a file in an existing folder of yours")
    if any(importlib.util.find_spec(name) is None for name in ("imageio", "imageio_ffmpeg")):
        raise InputError(f"--video {path}: needs imageio with ffmpeg; run pip install 'ddrl[video]'")


class Recorder:
    """Writes pictures to a video, whole or not at all: the file appears as the context ends without an error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(f"{path.stem}.partial{SUFFIX}")
        self._writer: Any = None

    def __enter__(self) -> Recorder:
        return self

    def add(self, picture: np.ndarray, hz: float) -> None:
        """Append a picture.

        Args:
            picture: uint8 [H, W] or [H, W, 3], all of one size.
            hz: pictures of a second; that of the first one counts.
        """
        if self._writer is None:
            import imageio

            self._writer = imageio.get_writer(
                self._partial, format="FFMPEG", mode="I", fps=hz, codec="libx264", macro_block_size=2
            )
        self._writer.append_data(enlarge(picture))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writer is None:
            return
        self._writer.close()
        if kind is None:
            self._partial.replace(self._path)
        else:
            with contextlib.suppress(OSError):
                self._partial.unlink()


def enlarge(picture: np.ndarray) -> np.ndarray:
    """[H, W] or [H, W, 3] -> [H', W', 3], large enough to be looked at, both sides even as the codec wants them."""
    if picture.ndim == 2:
        picture = np.repeat(picture[:, :, None], 3, axis=2)
    factor = max(1, -(-_LEAST_SIZE // min(picture.shape[:2])))
    picture = picture.repeat(factor, axis=0).repeat(factor, axis=1)
    height, width = picture.shape[:2]
    return np.pad(picture, ((0, height % 2), (0, width % 2), (0, 0)))
