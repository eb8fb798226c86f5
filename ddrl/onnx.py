"""A policy as an ONNX file, which plays without ddrl and torch, in any language that has onnxruntime.

The graph scales and normalizes observations, honours masks, and returns actions in the environment's unit. The first
axis of all is N, any number of environments. Inputs: `observation` [N, *I], as the environment of
`LoadedPolicy.make_env` gives it, of several frames the newest, oldest first; of a recurrent policy also the arrays of
`RecurrentState`. Outputs: `action` [N, *A]; of choices `scores` [N, A], dimension after dimension, of which the largest
are the action; of a recurrent policy `new_hidden` [N, H].
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ddrl.algorithms.base import Exportable, advance
from ddrl.config import first_line
from ddrl.networks.device import all_digits
from ddrl.networks.trunks import to_input
from ddrl.policy import LoadedPolicy
from ddrl.store.local_checkpoints import write_whole
from ddrl.types import EnvSpec

TOLERANCE = 1e-5  # of scores and actions, of their size where that is more than 1
_EXAMPLES, _STEPS = 3, 4  # environments and steps by which a file is compared with the policy


class OnnxError(ValueError):
    """A policy that cannot be exported, or a package that is missing; one line with the remedy."""


class _Graph(nn.Module):
    """A policy's module between what the file takes and what it returns."""

    def __init__(self, module: nn.Module, spec: EnvSpec) -> None:
        super().__init__()
        self.policy, self._spec = module, spec

    def forward(self, observation: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        seen = to_input(observation)
        result = self.policy(seen, *state)
        output, *hidden = result if state else (result,)
        if self._spec.action_kind == "continuous":
            return (output, *hidden)
        scores = self._spec.only_allowed(output, seen)
        parts = scores.split_with_sizes(list(self._spec.action_sizes), dim=1)
        action = torch.stack([part.argmax(dim=1) for part in parts], dim=1)
        return (action.reshape(-1, *self._spec.action_shape), scores, *hidden)


def save(loaded: LoadedPolicy, path: Path) -> None:
    """Write a policy to an ONNX file, whole or not at all, after it was compared with the policy in onnxruntime.

    Its metadata holds run, version, and the config and the spaces as JSON.

    Raises:
        OnnxError: a package is missing, or the policy cannot be exported: which layer, and why.
        OSError: the file cannot be written.
    """
    _check(loaded)
    data = _exported(loaded).SerializeToString()
    _compare(loaded, data)
    write_whole(path, data)


class Template:
    """The file of a policy, exported once; the weights of each version are put into it, which takes milliseconds.

    Args:
        loaded: the policy; other weights are loaded into it.
        weights: of any version.

    Raises:
        OnnxError: as of `save`, or weights become other numbers on their way into the file.
    """

    def __init__(self, loaded: LoadedPolicy, weights: Mapping[str, Any]) -> None:
        _check(loaded)
        self._loaded, generator = loaded, np.random.default_rng(0)
        # All numbers are made different, so that a constant of the file is known by its values.
        loaded.policy.load(_others(weights, generator))
        arrays = _arrays(_graph(loaded)).items()
        names = {array.tobytes(): name for name, array in arrays if array.dtype.kind == "f"}
        self._model = _exported(loaded, optimize=False)
        constants = self._model.graph.initializer
        self._places = [(one, names[one.raw_data]) for one in constants if one.raw_data in names]
        for given in (_others(weights, generator), weights):
            _compare(loaded, self.filled(0, given))

    def filled(self, version: int, weights: Mapping[str, Any]) -> bytes:
        """Return the file of a version."""
        self._loaded.version = version
        self._loaded.policy.load(weights)
        arrays = _arrays(_graph(self._loaded))
        for constant, name in self._places:
            constant.raw_data = arrays[name].tobytes()
        for fact in self._model.metadata_props:
            fact.value = self._loaded.metadata.get(fact.key, fact.value)
        return cast(bytes, self._model.SerializeToString())


def _others(weights: Mapping[str, Any], generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Return other numbers of the same shapes."""
    arrays = {name: np.asarray(array) for name, array in weights.items()}
    return {name: generator.uniform(0.01, 0.1, one.shape).astype(one.dtype) for name, one in arrays.items()}


def _arrays(graph: nn.Module) -> dict[str, np.ndarray]:
    return {name: one.detach().numpy() for name, one in (*graph.named_parameters(), *graph.named_buffers())}


def _check(loaded: LoadedPolicy) -> None:
    try:
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401  # torch's exporter needs it
    except ImportError as error:
        raise OnnxError(f"onnx: {error.name} is not installed; pip install 'ddrl[onnx]'") from None
    if not hasattr(loaded.policy, "module"):
        name = loaded.config.algorithm["name"]
        raise OnnxError(f"{name}: its Policy has no module to export; add it as the guide shows")


def _compare(loaded: LoadedPolicy, data: bytes) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    with all_digits():  # as onnxruntime's
        found = difference(loaded, session)
    if not found <= TOLERANCE:  # it may be NaN
        reason = f"in onnxruntime it differs by {found:.1e}, more than {TOLERANCE:g}"
        raise OnnxError(f"{loaded.run}@{loaded.version}: {reason}; nothing was written")


def difference(loaded: LoadedPolicy, session: Any, *, seed: int = 0) -> float:
    """Return by how much an ONNX session differs from the policy, relative where numbers are larger than 1.

    Both play a few steps of random observations. Compared are all numbers; of choices also by how much the score of
    the policy's action is below the largest.
    """
    policy, spec, differences = loaded.policy, loaded.spaces, [0.0]
    graph, state = _graph(loaded), policy.initial_state(_EXAMPLES)
    for step in range(_STEPS):
        observation = _observations(spec, seed + step)
        inputs = [observation, *(array.copy() for array in state.values())]
        found = session.run(None, dict(zip(["observation", *state], inputs, strict=True)))
        with torch.inference_mode():
            expected = [output.numpy() for output in graph(*map(torch.from_numpy, inputs))]
        action = policy.act(observation, state)
        pairs = list(zip(found, expected, strict=True))
        if state:
            pairs.append((found[-1], state["hidden"]))
        if spec.action_kind == "continuous":
            pairs.append((found[0], action))
        else:
            choices = action.reshape(_EXAMPLES, -1).T
            parts = np.split(found[1], np.cumsum(spec.action_sizes)[:-1], axis=1)
            best = [part.max(axis=1) for part in parts]
            chosen = [part[range(_EXAMPLES), one] for part, one in zip(parts, choices, strict=True)]
            pairs[0] = np.stack(best), np.stack(chosen)  # how far the choices are from the best scores
        differences += [float((abs(a - b) / np.maximum(1.0, abs(b))).max()) for a, b in pairs]
        advance(state, action, np.full(_EXAMPLES, 0.5, np.float32), np.zeros(_EXAMPLES, bool))
    return float(np.max(differences))


def _observations(spec: EnvSpec, seed: int) -> np.ndarray:
    """Return random observations [_EXAMPLES, *I], whose masks allow some choices of each dimension."""
    generator, shape = np.random.default_rng(seed), (_EXAMPLES, *spec.input_shape)
    if spec.observation_dtype == "uint8":
        return generator.integers(256, size=shape, dtype=np.uint8)
    seen = generator.standard_normal(shape, np.float32)
    if num := spec.num_masked:
        seen[:, -num:] = generator.random((_EXAMPLES, num)) < 0.5
        seen[:, np.cumsum((0, *spec.action_sizes[:-1])) - num] = 1.0
    return seen


def _graph(loaded: LoadedPolicy) -> nn.Module:
    return _Graph(cast(Exportable, loaded.policy).module(), loaded.spaces).eval()


def _exported(loaded: LoadedPolicy, *, optimize: bool = True) -> Any:
    """Return the policy as an `onnx.ModelProto`; `optimize` may change its constants.

    Raises:
        OnnxError: a layer cannot be exported.
    """
    graph, state = _graph(loaded), loaded.policy.initial_state(_EXAMPLES)
    names = ["observation", *state]
    inputs = tuple(map(torch.from_numpy, (_observations(loaded.spaces, 0), *state.values())))
    outputs = ["action"] if loaded.spaces.action_kind == "continuous" else ["action", "scores"]
    size = {0: torch.export.Dim("num_envs")}
    sizes: tuple[Any, ...] = (size,)
    if len(inputs) > 1:
        outputs, sizes = [*outputs, "new_hidden"], (size, (size,) * (len(inputs) - 1))
    try:
        options: dict[str, Any] = {"input_names": names, "output_names": outputs, "dynamic_shapes": sizes}
        program = _convert(graph, inputs, optimize=optimize, **options)
    except Exception as error:  # whatever the exporter raises
        layer, reason = _culprit(graph, inputs) or ("policy", error)
        raise OnnxError(f"{layer}: is not for ONNX ({_cause(reason)}); use another layer") from None
    program.model.metadata_props.update(loaded.metadata)
    return program.model_proto


def _convert(module: nn.Module, inputs: tuple[Tensor, ...], **options: Any) -> Any:
    """Return torch's ONNX program of a module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)  # what it cannot do it raises
        try:
            return torch.onnx.export(module, inputs, dynamo=True, verbose=False, **options)
        finally:
            logging.disable(logging.NOTSET)


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)


def _culprit(graph: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[str, Exception] | None:
    """Return the innermost module that cannot be exported by itself, by name and type, and why."""
    seen: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {}
    hooks = [
        module.register_forward_pre_hook(lambda module, args, name=name: seen.update({name: (module, args)}))
        for name, module in graph.named_modules()
    ]
    with torch.inference_mode():
        graph(*inputs)
    for hook in hooks:
        hook.remove()
    for name, (module, args) in sorted(seen.items(), key=lambda item: -item[0].count(".")):
        try:
            _convert(module, args)
        except Exception as error:
            return f"{name.removeprefix('policy.')} ({type(module).__name__})", error
    return None
