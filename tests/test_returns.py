"""Returns and their rescaling: hand numbers, slow twins, identities, endings, gradients, refusals."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import reference_returns as twin
from support.reference_returns import Steps, lanes, make_steps
from torch import Tensor
from torch.testing import assert_close

from ddrl import returns
from ddrl.returns import n_step_return, rescale, unrescale

# --- n-step returns, of arrays ---------------------------------------------------------------------------


def column(*values: float) -> np.ndarray:
    return np.array(values, np.float32)[:, None]


def flags(length: int, *at: int) -> np.ndarray:
    return np.isin(np.arange(length), at)[:, None]


@pytest.mark.parametrize(
    ("terminated", "truncated", "expected"),  # returns, discounts, numbers of rewards
    [
        ([], [], [[1 + 1 + 1, 2 + 2 + 2, 4 + 4, 8], [0.125, 0.125, 0.25, 0.5], [3, 3, 2, 1]]),
        ([1], [], [[2, 2, 8, 8], [0, 0, 0.25, 0.5], [2, 1, 2, 1]]),
        ([], [1], [[2, 2, 8, 8], [0.25, 0.5, 0.25, 0.5], [2, 1, 2, 1]]),
        ([1], [0], [[1, 2, 8, 8], [0.5, 0, 0.25, 0.5], [1, 1, 2, 1]]),  # of another episode
    ],
)
def test_n_step_hand_numbers(
    terminated: list[int], truncated: list[int], expected: list[list[float]]
) -> None:
    found = n_step_return(column(1, 2, 4, 8), flags(4, *terminated), flags(4, *truncated), gamma=0.5, n=3)
    assert [values[:, 0].tolist() for values in found] == expected
    assert [values.dtype for values in found] == [np.float32, np.float32, np.int64]


def test_n_step_sum_is_in_double_precision_and_without_what_lies_beyond_an_ending() -> None:
    found, _, _ = n_step_return(column(2.0**24, 1, 1, np.inf), flags(4, 2), flags(4), gamma=1.0, n=4)
    assert found[0, 0] == np.float32(2.0**24 + 2)  # in float32 each 1 would be lost


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    shape=st.tuples(st.integers(1, 12), st.integers(1, 4)),
    n=st.integers(1, 14),
    gamma=st.sampled_from([0.0, 0.5, 1.0]),
    end_rate=st.sampled_from([0.0, 0.2, 0.9]),
)
def test_n_step_equals_the_slow_twin(
    seed: int, shape: tuple[int, int], n: int, gamma: float, end_rate: float
) -> None:
    random = np.random.default_rng(seed)
    reward = random.integers(-8, 9, shape).astype(np.float32)
    ended, terminates = random.random(shape) < end_rate, random.random(shape) < 0.5
    columns = (reward, ended & terminates, ended & ~terminates)
    found = np.stack(n_step_return(*columns, gamma=gamma, n=n), axis=-1)
    for t, lane in np.ndindex(shape):
        slow = twin.slow_return(*(values[t:, lane] for values in columns), gamma=gamma, n=n)
        assert found[t, lane].tolist() == list(slow)


def test_n_step_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match=r"\(1, 1\)"):
        n_step_return(column(1, 2), flags(1), flags(2), gamma=0.9, n=1)


# --- estimators of learning on-policy, of tensors --------------------------------------------------------


def estimate_by(name: str, steps: Steps, **options: float) -> tuple[Tensor, ...]:
    """Call an estimator with the columns that it takes; the last of the results is the return."""
    function = getattr(returns, name)
    taken = inspect.signature(function).parameters.keys() & set(Steps._fields)
    result = function(**{column: getattr(steps, column) for column in taken}, **options)
    return result if isinstance(result, tuple) else (result,)


Estimator = Callable[..., tuple[Tensor, ...]]
td_lambda, gae, vtrace = (partial(estimate_by, name, lambda_=0.75) for name in ("td_lambda", "gae", "vtrace"))
monte_carlo, upgo = partial(estimate_by, "monte_carlo"), partial(estimate_by, "upgo")
ESTIMATORS: list[Estimator] = [td_lambda, monte_carlo, gae, vtrace, upgo]
identical = partial(assert_close, rtol=0.0, atol=0.0)
each_estimator = pytest.mark.parametrize("estimate", ESTIMATORS, ids=lambda each: each.args[0])


def make_lane(
    reward: list[float], value: list[float], next_value: list[float], rho: list[float], *, gamma: float = 0.5
) -> Steps:
    """One lane, [T, 1], that goes on to its end."""
    columns = (reward, [gamma] * len(reward), value, next_value, rho)
    *tensors, ratio = (torch.tensor(column)[:, None] for column in columns)
    return Steps(*tensors, torch.ones(len(reward), 1, dtype=torch.bool), ratio.log())


HAND = make_lane([1.0, 2.0, 4.0], [2.0, 4.0, 8.0], [4.0, 8.0, 6.0], [2.0, 0.5, 4.0])  # TD errors 1, 2, -1
EQUAL = make_lane([0.0] * 3, [0.0, 4.0, 4.0], [4.0, 4.0, 8.0], [1.0] * 3, gamma=1.0)  # TD errors 4, 0, 4


@pytest.mark.parametrize(
    ("steps", "estimate", "options", "expected"),
    [
        (HAND, td_lambda, {"lambda_": 0.5}, [[3.4375, 5.75, 7]]),
        (HAND, monte_carlo, {}, [[3.75, 5.5, 7]]),
        (HAND, gae, {"lambda_": 0.5}, [[1.4375, 1.75, -1], [3.4375, 5.75, 7]]),
        (HAND, vtrace, {"lambda_": 1.0}, [[1.375, 0.75, -1], [3.375, 4.75, 7]]),
        (HAND, vtrace, {"lambda_": 0.5}, [[1.4375, 0.75, -1], [3.21875, 4.875, 7]]),
        # Only delta uses rho_bar: c is cut at 1, and the advantage at its own bound.
        (HAND, vtrace, {"lambda_": 1.0, "rho_bar": 3.0}, [[1.125, 0.25, -1], [4.125, 4.25, 5]]),
        (HAND, vtrace, {"lambda_": 1.0, "pg_rho_bar": 2.5}, [[2.75, 0.75, -2.5], [3.375, 4.75, 7]]),
        (HAND, vtrace, {"lambda_": 1.0, "rho_bar": 3.0, "pg_rho_bar": 2.5}, [[2.25, 0.25, -2.5], [4.125, 4.25, 5]]),
        (HAND, upgo, {}, [[2, 1, -1], [4, 6, 7]]),  # step 1 does well and is followed, step 2 does not
        (EQUAL, upgo, {}, [[8, 4, 4], [8, 8, 8]]),  # what is just as good is followed
    ],
)  # fmt: skip
def test_hand_numbers(
    steps: Steps, estimate: Estimator, options: dict[str, float], expected: list[list[float]]
) -> None:
    assert torch.stack(estimate(steps, **options))[..., 0].tolist() == expected


@each_estimator
@pytest.mark.parametrize(("discount", "first"), [(0.5, 1 + 0.5 * 6), (0.0, 1)])
def test_endings(estimate: Estimator, discount: float, first: float) -> None:
    """A truncation bootstraps from the true next state, not from the next row; a termination from none."""
    steps = make_lane([1.0, 2.0], [3.0, 100.0], [6.0, 4.0], [1.0, 1.0])
    steps.continues[0] = False
    steps.discount[0] = discount
    *advantage, return_ = estimate(steps)
    assert return_.ravel().tolist() == [first, 2 + 0.5 * 4]
    assert [column.ravel().tolist() for column in advantage] in ([], [[first - 3, 4 - 100]])


@each_estimator
def test_value_that_is_right_stays(estimate: Estimator) -> None:
    """An endless reward of 1 is worth 1 / (1 - gamma), over any cuts that bootstrap."""
    steps = make_lane([1.0] * 20, [8.0] * 20, [8.0] * 20, [0.5, 2.0] * 10, gamma=0.875)
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
    identical([result[:6] for result in estimate(steps)], before)


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
    limits = {"lambda_": lambda_, "rho_bar": rho_bar, "pg_rho_bar": pg_rho_bar}
    of_lambda = *td_lambda(steps, lambda_=lambda_), *gae(steps, lambda_=lambda_)
    fast = *of_lambda, *monte_carlo(steps), *vtrace(steps, **limits), *upgo(steps)
    tolerance = 1e-5 if steps.reward.dtype == torch.float32 else 1e-12
    for i, lane in enumerate(lanes(steps)):
        for t in range(len(steps.reward)):
            advantage = twin.slow_gae(lane, t, lambda_=lambda_)
            slow = (
                twin.slow_td_lambda(lane, t, lambda_=lambda_),
                *(advantage, advantage + lane.value[t]),
                twin.slow_monte_carlo(lane, t),
                *twin.slow_vtrace(lane, t, **limits),
                *twin.slow_upgo(lane, t),
            )
            found = [result[t, i].item() for result in fast]
            assert found == pytest.approx(slow, rel=tolerance, abs=tolerance)


@settings(max_examples=60, deadline=None)
@given(steps=random_steps, lambda_=lambdas)
def test_identities(steps: Steps, lambda_: float) -> None:
    equal = partial(assert_close, rtol=1e-5, atol=1e-5)
    (lambda_return,) = td_lambda(steps, lambda_=lambda_)
    (to_the_cut,) = monte_carlo(steps)

    equal(td_lambda(steps, lambda_=1.0)[0], to_the_cut)
    equal(td_lambda(steps, lambda_=0.0)[0], steps.reward + steps.discount * steps.next_value)
    advantage, return_ = gae(steps, lambda_=lambda_)
    equal(return_, lambda_return)
    equal(advantage + steps.value, lambda_return)

    on_policy = steps._replace(log_rho=torch.zeros_like(steps.log_rho))
    equal(vtrace(on_policy, lambda_=lambda_)[1], lambda_return)
    equal(vtrace(on_policy, lambda_=1.0)[0], to_the_cut - steps.value)
    likely = steps._replace(log_rho=steps.log_rho.abs())  # all ratios above 1 are 1
    equal(vtrace(likely, lambda_=lambda_), vtrace(on_policy, lambda_=lambda_))


@pytest.mark.parametrize("n", [1, 3, 7])
def test_vtrace_on_policy_is_the_n_step_return_of_the_paper(n: int) -> None:
    """Remark 1 of arXiv:1802.01561: n rewards and the bootstrap, for a fragment of n steps."""
    steps = make_steps(7, num_steps=n, num_envs=3, end_probability=0.0)
    _, return_ = vtrace(steps._replace(log_rho=torch.zeros_like(steps.log_rho)), lambda_=1.0)
    assert return_[0].tolist() == pytest.approx([twin.slow_n_step(lane, 0, n) for lane in lanes(steps)])


def test_upgo_lies_between_one_step_and_monte_carlo() -> None:
    steps = make_steps(8, num_steps=12, num_envs=8)
    high, low = (
        steps._replace(value=steps.value + shift, next_value=steps.next_value + shift)
        for shift in (1e3, -1e3)
    )
    assert_close(upgo(high)[1], high.reward + high.discount * high.next_value)
    assert_close(upgo(low)[1], monte_carlo(low)[0])


@pytest.mark.parametrize("estimate", [vtrace, upgo])
def test_ratios_beyond_the_range_of_float32_are_truncated(estimate: Estimator) -> None:
    far, on = (HAND._replace(log_rho=torch.full((3, 1), log_rho)) for log_rho in (1e3, 0.0))
    identical(estimate(far), estimate(on))


@each_estimator
def test_no_gradient_and_inputs_untouched(estimate: Estimator) -> None:
    steps = make_steps(9, num_steps=6, num_envs=3)
    before = [column.clone() for column in steps]
    for column in steps:
        column.requires_grad_(column.is_floating_point())
    for result in estimate(steps):
        assert not result.requires_grad
        result.fill_(7.0)  # nor do results share memory with the inputs
    identical([column.detach() for column in steps], before)


@each_estimator
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_are_like_the_inputs(estimate: Estimator, device: str, dtype: torch.dtype) -> None:
    steps = make_steps(10, num_steps=5, num_envs=3, dtype=dtype)
    for result in estimate(Steps(*(column.to(device) for column in steps))):
        assert (tuple(result.shape), result.dtype, result.device.type) == ((5, 3), dtype, device)


@each_estimator
def test_layout_in_memory_does_not_matter(estimate: Estimator) -> None:
    steps = make_steps(11, num_steps=7, num_envs=3)
    with torch.inference_mode():
        strided = estimate(Steps(*(column.t().contiguous().t() for column in steps)))
    identical(strided, estimate(steps))


@each_estimator
def test_unsuitable_columns_are_refused(estimate: partial[tuple[Tensor, ...]]) -> None:
    used = inspect.signature(getattr(returns, *estimate.args)).parameters.keys() & set(Steps._fields)
    assert {"reward", "discount", "next_value", "continues"} <= used
    for name in used:
        right = getattr(HAND, name)
        for wrong in (right[:2], right[:, 0], right[..., None], right.expand(3, 2)):
            with pytest.raises(ValueError, match=re.escape(str(tuple(wrong.shape)))) as caught:
                estimate(HAND._replace(**{name: wrong}))
            assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"expected the same \[T, B\] for all"):
        estimate(Steps(*(column[:, 0] for column in HAND)))
    with pytest.raises(ValueError, match=r"continues: torch\.float32 is no mask; use torch\.bool"):
        estimate(HAND._replace(continues=HAND.continues.float()))


# --- rescaling -------------------------------------------------------------------------------------------

FLOAT32 = 2.0**-23  # one unit in the last place, relative


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def everywhere() -> Tensor:
    """Numbers of both signs and all sizes up to 1e5, and 0."""
    size = torch.logspace(-12, 5, 4001, dtype=torch.float64)
    return torch.cat((-size, double(0.0), size, torch.linspace(-1e5, 1e5, 4001).double()))


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest error, as a share of what is expected."""
    return float(((found.double() - expected) / torch.where(expected == 0, 1.0, expected)).abs().max())


def test_rescaling_hand_numbers() -> None:
    x = double(0.0, 3.0, -3.0, 8.0, -99.0)
    for eps, expected in ((1e-3, (0.0, 1.003, -1.003, 2.008, -9.099)), (0.5, (0.0, 2.5, -2.5, 6.0, -58.5))):
        assert_close(rescale(x, eps), double(*expected))
        assert_close(unrescale(double(*expected), eps), x)


@pytest.mark.parametrize("eps", [1e-3, 1e-2, 0.3])
def test_rescaling_as_printed_in_the_paper(eps: float) -> None:
    x = torch.linspace(-300, 300, 601, dtype=torch.float64)
    printed, inverse = (
        double(*(f(float(v), eps) for v in x)) for f in (twin.slow_rescale, twin.slow_unrescale)
    )
    assert_close(rescale(x, eps), printed, rtol=1e-12, atol=1e-12)
    assert_close(unrescale(x, eps), inverse, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("eps", [0.0, 1e-3, 1e-2])
def test_each_is_the_inverse_of_the_other(eps: float) -> None:
    x = everywhere()
    assert relative(rescale(unrescale(x, eps), eps), x) < 1e-14
    assert relative(unrescale(rescale(x, eps), eps), x) < 1e-14


def test_float32_loses_a_few_units_in_the_last_place() -> None:
    x = everywhere().float()
    assert relative(rescale(x), rescale(x.double())) < 2 * FLOAT32
    assert relative(unrescale(x), unrescale(x.double())) < 4 * FLOAT32
    assert relative(unrescale(rescale(x)), x.double()) < 4 * FLOAT32


@pytest.mark.parametrize("function", [rescale, unrescale])
def test_odd_monotonic_and_of_the_kind_of_its_input(function) -> None:
    x = everywhere().sort().values.unique()
    assert torch.equal(function(-x), -function(x))
    assert bool((function(x).diff() > 0).all())
    small = function(torch.ones((2, 3, 1), dtype=torch.float32))
    assert small.shape == (2, 3, 1) and small.dtype == torch.float32
    array = function(x.numpy())  # the learner makes priorities of workers' values without torch
    assert isinstance(array, np.ndarray) and array.dtype == np.float64
    np.testing.assert_allclose(array, function(x).numpy(), rtol=1e-14)


def test_gradient_of_rescaling() -> None:
    x = double(0.0, 3.0, -8.0).requires_grad_()
    (gradient,) = torch.autograd.grad(rescale(x).sum(), x)  # 1 / (2 sqrt(|x| + 1)) + eps
    assert_close(gradient, double(0.501, 0.251, 1 / 6 + 0.001))
