"""A custom network starts by its seed, and is refused by what is wrong with it."""

from __future__ import annotations

import sys

import pytest
import torch
from support.networks import refusal, same, trunk


@pytest.fixture(autouse=True)
def _own_networks_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "own_networks")


@pytest.mark.parametrize("name", ["Good", "lazy"])
def test_a_seed_decides_and_the_global_generator_is_left_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing the module draws numbers, too; layers without a shape get theirs by the check."""
    monkeypatch.delitem(sys.modules, "own_networks", raising=False)
    first = trunk(f"own_networks:{name}", (4,), seed=1)
    before = torch.get_rng_state()
    second, other = (trunk(f"own_networks:{name}", (4,), seed=seed) for seed in (1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert same(first, second) and not same(first, other)
    assert first.training and all(parameter.grad is None for parameter in first.parameters())
    assert trunk("own_networks:Good", (4,), width=7)(torch.zeros(1, 4)).shape == (1, 7)


def test_it_draws_from_the_seeded_generator() -> None:
    drawn = []
    for seed, of_torch in ((5, 1), (5, 0), (None, 0)):
        torch.manual_seed(of_torch)
        drawn.append(trunk("own_networks:global_draws", (4,), seed=seed).drawn)
    assert torch.equal(drawn[0], drawn[1])
    torch.manual_seed(0)
    torch.nn.Linear(4, 3)
    assert torch.equal(drawn[2], torch.rand(3)), "nothing else was drawn meanwhile"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gives_list", "returned list; return a torch.nn.Module"),
        ("raises", "making it raised RuntimeError (too small); fix it for shape (4,)"),
        ("type_error_within", "refused (object of type 'int' has no len()); it is called as make(observation_shape"),
        ("forward_fails", "forward raised RuntimeError (first line) on float32 [2, 4]; make it take"),
        ("double", "forward raised RuntimeError (mat1 and mat2 must have the same dtype"),
        ("gives_tuple", "forward returned tuple, not a tensor; return float32 features [B, F] for observations [2, 4]"),
        ("three_axes", "forward returned shape [2, 1, 3]; return float32 features [B, F]"),
        ("mean_of_batch", "forward returned shape [1, 3]; return float32 features [B, F] for observations [2, 4]"),
        ("no_features", "forward returned shape [2, 0]; return float32 features"),
        ("gives_double", "forward returned float64; return float32 features"),
        ("nan_on_zeros", "forward returned NaN or infinity on zeros; check"),
        ("nan_on_noise", "forward returned NaN or infinity on noise in [0, 1]; check"),
        ("batch_wide", "returned 2 features for batch 1 and 3 for batch 2; return the same number always"),
        ("less_in_evaluation", "returned 2 features in evaluation mode and 3 in training; return the same number"),
        ("centers", "the features of one observation change with its batch"),
        ("twice_in_training", "by chance or in evaluation mode; use LayerNorm"),
        ("dropout", "by chance or in evaluation mode; use LayerNorm or GroupNorm instead of BatchNorm, and no Dropout"),
        ("batch_norm", "forward raised ValueError (Expected more than 1 value per channel when training"),
        ("batch_norm_2d", "use LayerNorm or GroupNorm instead of BatchNorm"),
        ("flatten", "has no trainable parameters; return a module with layers"),
        ("detached", "no gradient passes through forward; compute with torch"),
        ("frozen", "parameter layer.bias is not trainable; make it a buffer (register_buffer)"),
        ("unused", "parameter other.weight has no effect on the features; use it in forward or remove it"),
        ("mixed", "parameter scale is float64; make it float32"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_it_is_named(name: str, expected: str) -> None:
    assert expected in refusal(f"own_networks:{name}", (4,))


def test_where_it_may_not_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = "observation shape (4,) and keyword arguments {'widht': 3} refused ("
    assert expected in refusal("own_networks:Good", (4,), widht=3)
    expected = "making it raised IndexError (tuple index out of range); fix it for shape ()"
    assert expected in refusal("own_networks:Good", ())
    monkeypatch.delenv("DDRL_ALLOW_MODULES")
    expected = "may not be imported here; set DDRL_ALLOW_MODULES=own_networks on every machine that uses it"
    assert refusal("own_networks:Good", (4,)).endswith(f"module own_networks {expected}")
