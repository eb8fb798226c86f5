"""Returns and advantages: pure functions, time-major, vectorized over the second axis.

`n_step_return` works on NumPy arrays, where fragments are stored, `rescale` and `unrescale` on both. The others work on
torch tensors, on whatever device they lie, for learning on-policy, and share these arguments, all [T, B]:

- reward: r_t, the reward of the step from s_t, in training units.
- discount: d_t = gamma, or 0 where step t terminated its episode.
- value: V(s_t), in units of the return.
- next_value: V of the *true* s_{t+1}: after a truncation of the final observation, never of the reset one
  (`replay.storage.observation_block` picks the row); at a fragment's border the bootstrap. Without meaning where
  d_t = 0; equal to value[t + 1] where `continues`.
- continues: bool, row t + 1 is the next step of the same episode; the last row counts as False whatever it says.

Truncation rule of all of them: where `continues` is False the trace is cut and the target is r_t + d_t * next_value_t,
so that only termination (d_t = 0) removes the bootstrap. Nothing behind a cut, not even a NaN, influences rows
before it. No gradient flows through any of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # not imported: code that only cuts fragments needs no torch
    from torch import Tensor

Elements = TypeVar("Elements", "Tensor", NDArray[np.float64])


def n_step_return(
    reward: NDArray[Any], terminated: NDArray[np.bool_], truncated: NDArray[np.bool_], *, gamma: float, n: int
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
    """Return the sum of the next n discounted rewards, and the discount of the state that it bootstraps from.

    For each start t the sum uses k <= n steps: it stops with the step that terminates or truncates the
    episode, and at the fragment's end. Only termination removes the bootstrap: a time limit, or the end
    of a fragment, is not an outcome, so both bootstrap with the shorter power gamma^k.
    Source: Sutton and Barto 2018, section 7.1; Horgan et al. 2018, arXiv:1803.00933, section 4.1, whose
    cut at the end of a buffer is the same.

    Args:
        reward: [T, N] r_t, the reward of the step from s_t, in training units.
        terminated: [T, N] bool, step t ended the episode by its own rules; wins where both are set.
        truncated: [T, N] bool, step t was the last one before the episode was cut.
        gamma: discount of one step, in [0, 1].
        n: most steps summed, at least 1; n >= T sums to the fragment's end.

    Returns:
        n_step_return: [T, N] float32 sum of gamma^i * r_{t+i} for i < k, accumulated in float64.
        bootstrap_discount: [T, N] float32 gamma^k, or 0 where the episode terminated within the k steps.
        k: [T, N] int64 in 1..n, the steps that were used.

    Raises:
        ValueError: columns of different shapes.
    """
    if reward.ndim != 2 or reward.shape != terminated.shape or reward.shape != truncated.shape:
        raise ValueError(
            f"reward, terminated, truncated: shapes {reward.shape}, {terminated.shape}, {truncated.shape}; "
            "expected the same [T, N] for all"
        )
    num_steps = len(reward)
    ended = terminated | truncated  # [T, N]
    total = np.zeros(reward.shape, np.float64)
    k = np.zeros(reward.shape, np.int64)
    lost = np.zeros(reward.shape, np.bool_)  # terminated within the k steps
    alive = np.ones(reward.shape, np.bool_)  # the sum from t has not met an ending yet
    for i in range(min(n, num_steps)):
        last = num_steps - i  # starts whose i-th step lies in the fragment
        going = alive[:last]
        # np.add(where=) rather than a product with the mask: a masked infinite reward must not give NaN.
        np.add(total[:last], gamma**i * reward[i:].astype(np.float64), out=total[:last], where=going)
        k[:last] += going
        lost[:last] |= going & terminated[i:]
        going &= ~ended[i:]
    bootstrap_discount = np.where(lost, 0.0, np.power(float(gamma), k))
    return total.astype(np.float32), bootstrap_discount.astype(np.float32), k


def td_lambda(
    reward: Tensor, discount: Tensor, next_value: Tensor, continues: Tensor, *, lambda_: float
) -> Tensor:
    """Return the lambda-return: all n-step returns up to the next cut, weighted by (1 - lambda) * lambda^(n-1).

    G_t = r_t + d_t * ((1 - lambda) * V(s_{t+1}) + lambda * G_{t+1}); at a cut r_t + d_t * next_value_t.
    Source: Sutton and Barto 2018, section 12.1; the recursion: exercise 12.1.

    Args:
        reward: [T, B], as the module says; so are discount, next_value and continues.
        discount: [T, B].
        next_value: [T, B].
        continues: [T, B] bool.
        lambda_: in [0, 1]; 0 is the one-step target, 1 the Monte Carlo return.

    Returns:
        [T, B] return_, in units of the return.

    Raises:
        ValueError: columns of different shapes, or `continues` no bool.
    """
    follows, reward, discount, next_value = _columns(
        continues, reward=reward, discount=discount, next_value=next_value
    )
    bootstrap = _discounted(discount, next_value)
    first = reward + bootstrap.where(~follows, (1.0 - lambda_) * bootstrap)
    return _scan(first, lambda_ * discount, follows)


def monte_carlo(reward: Tensor, discount: Tensor, next_value: Tensor, continues: Tensor) -> Tensor:
    """Return the discounted sum of rewards up to the next cut, which bootstraps unless the episode terminated there.

    G_t = r_t + d_t * G_{t+1}; at a cut r_t + d_t * next_value_t.
    Source: Sutton and Barto 2018, section 5.1; with the bootstrap, section 7.1 with n up to the cut.

    Args:
        reward: [T, B], as the module says; so are discount, next_value and continues.
        discount: [T, B].
        next_value: [T, B]; used at cuts only.
        continues: [T, B] bool.

    Returns:
        [T, B] return_, in units of the return.

    Raises:
        ValueError: columns of different shapes, or `continues` no bool.
    """
    follows, reward, discount, next_value = _columns(
        continues, reward=reward, discount=discount, next_value=next_value
    )
    return _scan(reward + _discounted(discount, next_value).masked_fill(follows, 0.0), discount, follows)


def gae(
    reward: Tensor, discount: Tensor, value: Tensor, next_value: Tensor, continues: Tensor, *, lambda_: float
) -> tuple[Tensor, Tensor]:
    """Return the generalized advantage estimate and its lambda-return.

    A_t = delta_t + d_t * lambda * A_{t+1}, delta_t = r_t + d_t * next_value_t - V(s_t); at a cut delta_t.
    Source: Schulman et al. 2016, arXiv:1506.02438, equation 16.

    Args:
        reward: [T, B], as the module says; so are discount, value, next_value and continues.
        discount: [T, B].
        value: [T, B].
        next_value: [T, B].
        continues: [T, B] bool.
        lambda_: in [0, 1]; less is more bias by the value estimate, more is more variance.

    Returns:
        [T, B] advantage, and [T, B] return_ = advantage + value, which is `td_lambda`'s; in units of the return.

    Raises:
        ValueError: columns of different shapes, or `continues` no bool.
    """
    follows, reward, discount, value, next_value = _columns(
        continues, reward=reward, discount=discount, value=value, next_value=next_value
    )
    delta = reward + _discounted(discount, next_value) - value
    advantage = _scan(delta, lambda_ * discount, follows)
    return advantage, advantage + value


def vtrace(
    reward: Tensor,
    discount: Tensor,
    value: Tensor,
    next_value: Tensor,
    continues: Tensor,
    log_rho: Tensor,
    *,
    lambda_: float,
    rho_bar: float = 1.0,
    pg_rho_bar: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return V-trace: the policy gradient's advantage, and value targets corrected for actions of another policy.

    vs_t = V(s_t) + delta_t + d_t * c_t * (vs_{t+1} - V(s_{t+1})), at a cut V(s_t) + delta_t, where
    delta_t = min(rho_bar, rho_t) * (r_t + d_t * next_value_t - V(s_t)) and c_t = lambda * min(1, rho_t);
    advantage_t = min(pg_rho_bar, rho_t) * (r_t + d_t * vs_{t+1} - V(s_t)), with next_value_t for vs_{t+1} at a cut.
    With rho = 1, vs is the lambda-return of `td_lambda`.
    Source: Espeholt et al. 2018, arXiv:1802.01561, section 4.1, the recursion of remark 1 and the lambda of remark 2;
    the advantage: section 4.2. The truncation of c, c_bar in the paper, is always 1 here.

    Args:
        reward: [T, B], as the module says; so are discount, value, next_value and continues.
        discount: [T, B].
        value: [T, B].
        next_value: [T, B].
        continues: [T, B] bool.
        log_rho: [T, B] log of rho_t = pi(a_t | s_t) / mu(a_t | s_t), learning policy over playing one, in nats.
        lambda_: in [0, 1]; how far a correction reaches back; 1 is the paper's main form.
        rho_bar: truncation of rho in delta, above 0; it sets the policy whose value is learned: less is nearer to
            the playing policy, infinity the learning one. The paper assumes at least 1.
        pg_rho_bar: truncation of rho in the advantage, above 0; more is less bias and more variance.

    Returns:
        [T, B] advantage, weighted by its truncated rho, and [T, B] return_ = vs; in units of the return.

    Raises:
        ValueError: columns of different shapes, or `continues` no bool.
    """
    follows, reward, discount, value, next_value, log_rho = _columns(
        continues, reward=reward, discount=discount, value=value, next_value=next_value, log_rho=log_rho
    )
    rho = log_rho.exp()
    delta = rho.clamp(max=rho_bar) * (reward + _discounted(discount, next_value) - value)
    return_ = value + _scan(delta, lambda_ * rho.clamp(max=1.0) * discount, follows)
    next_return = return_.roll(-1, 0).where(follows, next_value)
    advantage = rho.clamp(max=pg_rho_bar) * (reward + _discounted(discount, next_return) - value)
    return advantage, return_


def upgo(
    reward: Tensor, discount: Tensor, value: Tensor, next_value: Tensor, continues: Tensor, log_rho: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the upgoing return: rewards as played while they are at least as high as expected, then a bootstrap.

    G_t = r_t + d_t * G_{t+1} if r_{t+1} + d_{t+1} * next_value_{t+1} >= V(s_{t+1}), else, and at a cut,
    r_t + d_t * next_value_t; advantage_t = min(1, rho_t) * (G_t - V(s_t)).
    Source: Vinyals et al. 2019, "Grandmaster level in StarCraft II using multi-agent reinforcement learning",
    Nature 575, methods, where Q(s, a) is the one-step target too and nothing is discounted.

    Args:
        reward: [T, B], as the module says; so are discount, value, next_value and continues.
        discount: [T, B].
        value: [T, B].
        next_value: [T, B].
        continues: [T, B] bool.
        log_rho: [T, B] log of rho_t = pi(a_t | s_t) / mu(a_t | s_t), learning policy over playing one, in nats.

    Returns:
        [T, B] advantage, weighted by its truncated rho, and [T, B] return_ = G; in units of the return.

    Raises:
        ValueError: columns of different shapes, or `continues` no bool.
    """
    follows, reward, discount, value, next_value, log_rho = _columns(
        continues, reward=reward, discount=discount, value=value, next_value=next_value, log_rho=log_rho
    )
    bootstrap = _discounted(discount, next_value)
    upgoing = follows & (reward + bootstrap >= value).roll(-1, 0)
    return_ = _scan(reward + bootstrap.masked_fill(upgoing, 0.0), discount, upgoing)
    return log_rho.exp().clamp(max=1.0) * (return_ - value), return_


def rescale(x: Elements, eps: float = 1e-3) -> Elements:
    """Squash returns to about their root: h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x.

    Source: Pohlen et al. 2018, arXiv:1805.11593, section 3.2. Written as x / (sqrt(|x| + 1) + 1) + eps x, which
    subtracts nothing: float32 loses two units in the last place, where the paper's form loses all digits of |x| < 1e-7.

    Args:
        x: of any shape, in units of the return.
        eps: slope that stays far from 0, at least 0; it keeps the inverse Lipschitz.

    Returns:
        h(x), of the same shape and dtype.
    """
    return x / ((abs(x) + 1.0) ** 0.5 + 1.0) + eps * x


def unrescale(x: Elements, eps: float = 1e-3) -> Elements:
    """Invert `rescale`: h^-1(x) = sign(x) (((sqrt(1 + 4 eps (|x| + 1 + eps)) - 1) / (2 eps))^2 - 1).

    Source: Pohlen et al. 2018, arXiv:1805.11593, proposition A.2. Differences of nearly equal numbers are multiplied
    out (r - 1 = |x| (2 - 4 eps / (s + 1 + 2 eps)) / (s + 1), s the inner root, r the base of the square): float32 then
    loses three units in the last place, where the paper's form is off by 1e-4 at 1 and below.

    Args:
        x: of any shape, as `rescale` gives it.
        eps: as of `rescale`.

    Returns:
        h^-1(x), of the same shape and dtype, in units of the return.
    """
    size = abs(x)
    root = ((1.0 + 2.0 * eps) ** 2 + 4.0 * eps * size) ** 0.5
    excess = (2.0 - 4.0 * eps / (root + (1.0 + 2.0 * eps))) / (root + 1.0)  # (r - 1) / |x|
    return x * excess * (size * excess + 2.0)


def _columns(continues: Tensor, **columns: Tensor) -> list[Tensor]:
    """Return `continues` with a last row of False, and the columns, all detached from gradients."""
    shapes = [tuple(column.shape) for column in (*columns.values(), continues)]
    if len(shapes[0]) != 2 or len(set(shapes)) != 1:
        raise ValueError(
            f"{', '.join(columns)}, continues: shapes {', '.join(map(str, shapes))}; expected the same [T, B] for all"
        )
    if str(continues.dtype) != "torch.bool":
        raise ValueError(f"continues: {continues.dtype} is no mask; use torch.bool")
    follows = continues.clone()
    follows[-1:] = False
    return [follows, *(column.detach() for column in columns.values())]


def _discounted(discount: Tensor, next_value: Tensor) -> Tensor:
    """Return d_t * V(s_{t+1}); 0 where d_t is 0, even if the value there is not finite."""
    return (discount * next_value).masked_fill(discount == 0.0, 0.0)


def _scan(first: Tensor, factor: Tensor, follows: Tensor) -> Tensor:
    """Overwrite `first` with x_t = first_t + factor_t * x_{t+1} where the next row follows; [T, B].

    In log2(T) rounds, each of which doubles the rows that every x_t contains.
    Source: Hillis and Steele 1986, "Data parallel algorithms", section 3.
    """
    product = factor.masked_fill(~follows, 0.0)  # of the factors of as many rows from t on
    num = 1
    while num < len(first):
        weight = product[:-num]
        cut = weight == 0.0  # what lies behind may be infinite, and must not give NaN
        first[:-num].addcmul_(weight, first[num:].masked_fill(cut, 0.0))
        weight.mul_(product[num:].masked_fill(cut, 0.0))
        num *= 2
    return first
