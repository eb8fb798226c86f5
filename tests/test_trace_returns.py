"""Estimators of learning on-policy: hand numbers, slow twins, identities, endings, and no gradient."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import reference_returns as twin
from support.reference_returns import Steps, lanes, make_steps
from torch import Tensor

from ddrl import returns
from ddrl.returns import gae, monte_carlo, td_lambda, upgo, vtrace


def run_td_lambda(steps: Steps, *, lambda_: float) -> tuple[Tensor, ...]:
    return (td_lambda(steps.reward, steps.discount, steps.next_value, steps.continues, lambda_=lambda_),)


def run_monte_carlo(steps: Steps) -> tuple[Tensor, ...]:
    return (monte_carlo(steps.reward, steps.discount, steps.next_value, steps.continues),)


def run_gae(steps: Steps, *, lambda_: float) -> tuple[Tensor, ...]:
    return gae(*steps[:5], lambda_=lambda_)


def run_vtrace(
    steps: Steps, *, rho_bar: float = 1.0, pg_rho_bar: float = 1.0, **more: float
) -> tuple[Tensor, ...]:
    return vtrace(*steps, rho_bar=rho_bar, pg_rho_bar=pg_rho_bar, **more)


def run_upgo(steps: Steps) -> tuple[Tensor, ...]:
    return upgo(*steps)


Estimator = Callable[..., tuple[Tensor, ...]]
ESTIMATORS: dict[str, Estimator] = {  # the last of the results is the return
    "td_lambda": partial(run_td_lambda, lambda_=0.75),
    "monte_carlo": run_monte_carlo,
    "gae": partial(run_gae, lambda_=0.75),
    "vtrace": partial(run_vtrace, lambda_=0.75),
    "upgo": run_upgo,
}
each_estimator = pytest.mark.parametrize("estimate", ESTIMATORS.values(), ids=ESTIMATORS)


def make_lane(
    reward: list[float],
    value: list[float],
    next_value: list[float],
    *,
    gamma: float = 0.5,
    rho: list[float] | None = None,
) -> Steps:
    """One lane, [T, 1], that goes on to its end."""
    columns = (reward, [gamma] * len(reward), value, next_value, rho or [1.0] * len(reward))
    tensors = [torch.tensor(column)[:, None] for column in columns]
    return Steps(*tensors[:4], torch.ones(len(reward), 1, dtype=torch.bool), tensors[4].log())


HAND = make_lane([1.0, 2.0, 4.0], [2.0, 4.0, 8.0], [4.0, 8.0, 6.0], rho=[2.0, 0.5, 4.0])  # TD errors 1, 2, -1


@pytest.mark.parametrize(
    ("estimate", "expected"),
    [
        (partial(run_td_lambda, lambda_=0.5), [[3.4375, 5.75, 7]]),
        (run_monte_carlo, [[3.75, 5.5, 7]]),
        (partial(run_gae, lambda_=0.5), [[1.4375, 1.75, -1], [3.4375, 5.75, 7]]),
        (partial(run_vtrace, lambda_=1.0), [[1.375, 0.75, -1], [3.375, 4.75, 7]]),
        (partial(run_vtrace, lambda_=0.5), [[1.4375, 0.75, -1], [3.21875, 4.875, 7]]),
        # Only delta uses rho_bar: c is cut at 1, and the advantage at its own bound.
        (partial(run_vtrace, lambda_=1.0, rho_bar=3.0), [[1.125, 0.25, -1], [4.125, 4.25, 5]]),
        (partial(run_vtrace, lambda_=1.0, pg_rho_bar=2.5), [[2.75, 0.75, -2.5], [3.375, 4.75, 7]]),
        (partial(run_vtrace, lambda_=1.0, rho_bar=3.0, pg_rho_bar=2.5), [[2.25, 0.25, -2.5], [4.125, 4.25, 5]]),
        (run_upgo, [[2, 1, -1], [4, 6, 7]]),  # step 1 does well and is followed, step 2 does not
    ],
)  # fmt: skip
def test_hand_numbers(estimate: Estimator, expected: list[list[float]]) -> None:
    for result, numbers in zip(estimate(HAND), expected, strict=True):
        torch.testing.assert_close(result[:, 0], torch.tensor(numbers, dtype=torch.float32))


def test_upgo_follows_what_is_just_as_good() -> None:
    steps = make_lane([0.0, 0.0, 0.0], [0.0, 4.0, 4.0], [4.0, 4.0, 8.0], gamma=1.0)
    assert run_upgo(steps)[1].ravel().tolist() == [8, 8, 8]


@each_estimator
@pytest.mark.parametrize(
    ("discount", "first"), [(0.5, 1 + 0.5 * 6), (0.0, 1)], ids=["truncated", "terminated"]
)
def test_endings(estimate: Estimator, discount: float, first: float) -> None:
    """A truncation bootstraps from the true next state, not from the next row; a termination from none."""
    steps = make_lane([1.0, 2.0], [3.0, 100.0], [6.0, 4.0])
    steps.continues[0] = False
    steps.discount[0] = discount
    *advantage, return_ = estimate(steps)
    assert return_.ravel().tolist() == [first, 2 + 0.5 * 4]
    assert [column.ravel().tolist() for column in advantage] in ([], [[first - 3, 4 - 100]])


@each_estimator
def test_value_that_is_right_stays(estimate: Estimator) -> None:
    """An endless reward of 1 is worth 1 / (1 - gamma), over any cuts that bootstrap."""
    steps = make_lane([1.0] * 20, [8.0] * 20, [8.0] * 20, gamma=0.875, rho=[0.5, 2.0] * 10)
    steps.continues[[4, 11]] = False
    *advantage, return_ = estimate(steps)
    assert torch.all(return_ == 8)
    assert all(torch.all(column == 0) for column in advantage)


@each_estimator
@pytest.mark.parametrize("garbage", [1e30, float("inf"), float("nan")])
def test_nothing_behind_a_cut_reaches_before_it(estimate: Estimator, garbage: float) -> None:
    steps = make_steps(4, num_steps=12, num_envs=5, end_probability=0.1)
    steps.continues[5] = False
    steps.discount[5] = 0.0
    before = [result[:6].clone() for result in estimate(steps)]
    for column in (steps.reward, steps.value, steps.next_value, steps.log_rho):
        column[6:] = garbage
    steps.next_value[5] = garbage  # without meaning after a termination
    for result, expected in zip(estimate(steps), before, strict=True):
        assert torch.equal(result[:6], expected)


random_steps = st.builds(
    make_steps,
    seed=st.integers(0, 2**32),
    num_steps=st.integers(1, 12),
    num_envs=st.integers(1, 4),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    end_probability=st.sampled_from([0.0, 0.2, 0.9]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
lambdas, bounds = st.sampled_from([0.0, 0.3, 0.95, 1.0]), st.sampled_from([0.5, 1.0, 2.0, float("inf")])


@settings(max_examples=150, deadline=None)
@given(steps=random_steps, lambda_=lambdas, rho_bar=bounds, pg_rho_bar=bounds)
def test_equal_the_slow_twins(steps: Steps, lambda_: float, rho_bar: float, pg_rho_bar: float) -> None:
    limits = {"rho_bar": rho_bar, "pg_rho_bar": pg_rho_bar}
    fast = (
        *run_td_lambda(steps, lambda_=lambda_),
        *run_monte_carlo(steps),
        *run_gae(steps, lambda_=lambda_),
        *run_vtrace(steps, lambda_=lambda_, **limits),
        *run_upgo(steps),
    )
    for i, lane in enumerate(lanes(steps)):
        for t in range(len(steps.reward)):
            advantage = twin.slow_gae(lane, t, lambda_=lambda_)
            slow = (
                twin.slow_td_lambda(lane, t, lambda_=lambda_),
                twin.slow_monte_carlo(lane, t),
                *(advantage, advantage + lane.value[t]),
                *twin.slow_vtrace(lane, t, lambda_=lambda_, **limits),
                *twin.slow_upgo(lane, t),
            )
            tolerance = 1e-5 if steps.reward.dtype == torch.float32 else 1e-12
            found = [result[t, i].item() for result in fast]
            assert found == pytest.approx(slow, rel=tolerance, abs=tolerance)


@settings(max_examples=60, deadline=None)
@given(steps=random_steps, lambda_=lambdas)
def test_identities(steps: Steps, lambda_: float) -> None:
    equal = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    (lambda_return,) = run_td_lambda(steps, lambda_=lambda_)
    (to_the_cut,) = run_monte_carlo(steps)
    one_step = steps.reward + steps.discount * steps.next_value

    equal(run_td_lambda(steps, lambda_=1.0)[0], to_the_cut)
    equal(run_td_lambda(steps, lambda_=0.0)[0], one_step)
    advantage, return_ = run_gae(steps, lambda_=lambda_)
    equal(return_, lambda_return)
    equal(advantage + steps.value, lambda_return)

    on_policy = steps._replace(log_rho=torch.zeros_like(steps.log_rho))
    equal(run_vtrace(on_policy, lambda_=lambda_)[1], lambda_return)
    equal(run_vtrace(on_policy, lambda_=1.0)[0], to_the_cut - steps.value)
    off_policy = run_vtrace(steps._replace(log_rho=steps.log_rho.abs()), lambda_=lambda_)
    for result, expected in zip(off_policy, run_vtrace(on_policy, lambda_=lambda_), strict=True):
        equal(result, expected)  # all ratios above 1 are 1


@pytest.mark.parametrize("n", [1, 3, 7])
def test_vtrace_on_policy_is_the_n_step_return_of_the_paper(n: int) -> None:
    """Remark 1 of arXiv:1802.01561: n rewards and the bootstrap, for a fragment of n steps."""
    steps = make_steps(7, num_steps=n, num_envs=3, end_probability=0.0)
    _, return_ = run_vtrace(steps._replace(log_rho=torch.zeros_like(steps.log_rho)), lambda_=1.0)
    assert return_[0].tolist() == pytest.approx([twin.slow_n_step(lane, 0, n) for lane in lanes(steps)])


def test_upgo_lies_between_one_step_and_monte_carlo() -> None:
    steps = make_steps(8, num_steps=12, num_envs=8)
    high, low = (
        steps._replace(value=steps.value + shift, next_value=steps.next_value + shift)
        for shift in (1e3, -1e3)
    )
    torch.testing.assert_close(run_upgo(high)[1], high.reward + high.discount * high.next_value)
    torch.testing.assert_close(run_upgo(low)[1], run_monte_carlo(low)[0])


def test_ratios_beyond_the_range_of_float32_are_truncated() -> None:
    far = HAND._replace(log_rho=torch.full((3, 1), 1e3))
    on = HAND._replace(log_rho=torch.zeros(3, 1))
    for estimate in (ESTIMATORS["vtrace"], run_upgo):
        for result, expected in zip(estimate(far), estimate(on), strict=True):
            assert torch.equal(result, expected)


@each_estimator
def test_no_gradient_and_inputs_untouched(estimate: Estimator) -> None:
    steps = make_steps(9, num_steps=6, num_envs=3)
    before = [column.clone() for column in steps]
    for column in steps:
        column.requires_grad_(column.is_floating_point())
    results = estimate(steps)
    assert not any(result.requires_grad for result in results)
    for result in results:
        result.fill_(7.0)  # nor do results share memory with the inputs
    assert all(torch.equal(column, old) for column, old in zip(steps, before, strict=True))


@each_estimator
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shape_dtype_and_device_are_those_of_the_inputs(
    estimate: Estimator, device: str, dtype: torch.dtype
) -> None:
    steps = make_steps(10, num_steps=5, num_envs=3, dtype=dtype)
    for result in estimate(Steps(*(column.to(device) for column in steps))):
        assert (tuple(result.shape), result.dtype, result.device.type) == ((5, 3), dtype, device)


@each_estimator
def test_layout_in_memory_does_not_matter(estimate: Estimator) -> None:
    steps = make_steps(11, num_steps=7, num_envs=3)
    with torch.inference_mode():
        strided = estimate(Steps(*(column.t().contiguous().t() for column in steps)))
    for result, expected in zip(strided, estimate(steps), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("name", ["td_lambda", "gae", "vtrace"])
@pytest.mark.parametrize("lambda_", [-0.01, 1.01, float("nan")])
def test_lambda_out_of_range_is_refused(name: str, lambda_: float) -> None:
    with pytest.raises(ValueError, match=r"^lambda: .* from 0 to 1$"):
        ESTIMATORS[name](HAND, lambda_=lambda_)


@pytest.mark.parametrize("name", ["rho_bar", "pg_rho_bar"])
@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan")])
def test_truncation_out_of_range_is_refused(name: str, bound: float) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: .* above 0"):
        run_vtrace(HAND, lambda_=1.0, **{name: bound})


@pytest.mark.parametrize("name", ESTIMATORS)
def test_columns_of_other_shapes_are_refused(name: str) -> None:
    used = inspect.signature(getattr(returns, name)).parameters.keys() & set(Steps._fields)
    assert {"reward", "discount", "next_value", "continues"} <= used
    for column in used:
        right = getattr(HAND, column)
        for wrong in (right[:2], right[:, 0], right[..., None], right.expand(3, 2)):
            with pytest.raises(ValueError, match=re.escape(str(tuple(wrong.shape)))) as caught:
                ESTIMATORS[name](HAND._replace(**{column: wrong}))
            assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"expected the same \[T, B\] for all"):
        ESTIMATORS[name](Steps(*(column[:, 0] for column in HAND)))


@each_estimator
def test_continues_must_be_a_mask(estimate: Estimator) -> None:
    with pytest.raises(ValueError, match=r"continues: torch\.float32 is no mask; use torch\.bool"):
        estimate(HAND._replace(continues=HAND.continues.float()))
