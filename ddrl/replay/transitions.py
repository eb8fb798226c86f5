"""Transitions as the items of a replay: cut from fragments, and gathered as batches.

Here `terminated` and `truncated` become a discount (by `returns.n_step_return`), and a truncated step is tied to its
true final observation instead of the first one of the next episode.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ddrl.replay.hindsight import Hindsight
from ddrl.replay.storage import Columns, Cut, Ring, Rows, observation_block
from ddrl.returns import n_step_return
from ddrl.types import Batch, Fragment

_MAX_RETURN = float(np.finfo(np.float32).max)


class TransitionItems:
    """n-step transitions in order of time, environments of one step side by side.

    A transition is an item of the fragment with which its sum is whole: after n_step rewards, or at its episode's end.
    So the last n_step - 1 context steps give transitions too, and the last steps of a fragment give theirs in the next
    one, of which they are the context. Those of a player that ends are lost. Where fragments repeat fewer steps, as
    another algorithm's may, those that the next one does not repeat give shorter sums at once.

    Args:
        gamma: discount of one agent step, in [0, 1].
        n_step: rewards summed, at least 1; fewer where the episode ends.
        repeated: context steps of each fragment beside those of the stack; None: n_step - 1.
        frame_stack: K observations that a network sees at once.
        hindsight: gives transitions further goals; None: no. It takes n_step 1 and no stacks.
    """

    def __init__(
        self,
        *,
        gamma: float,
        n_step: int,
        repeated: int | None = None,
        frame_stack: int = 1,
        hindsight: Hindsight | None = None,
    ) -> None:
        self._gamma, self._n_step, self._hindsight = gamma, n_step, hindsight
        self._repeated = n_step - 1 if repeated is None else min(repeated, n_step - 1)
        self.frame_stack = frame_stack

    def room(self, capacity: int) -> tuple[int, int, int]:
        """Return the expected numbers of rows, items and steps for `capacity` transitions."""
        num_goals = 1 + (self._hindsight.num if self._hindsight else 0)
        return expected_rows(capacity, context=self._n_step - 1), capacity * num_goals, 1

    def cut(self, fragment: Fragment) -> Cut:
        """Cut a fragment into the transitions whose sums it completes; in any thread.

        Returns:
            Items with row (of s_t), ahead (int32, rows from there to s_{t+k}; without meaning after a termination),
            action, n_step_return, bootstrap_discount; with hindsight also goal. The TD error is
            |R + discount * max_a Q(s_{t+k}, a) - Q(s_t, a)|. Source: Horgan et al. 2018, arXiv:1803.00933, section 3.
            The acting policy does not value final observations and a fragment's last row; the value of the step before
            stands in.

        Raises:
            ValueError: the fragment's values are no float32 columns [C+T, N], or its returns need not be finite.
        """
        check_rewards(fragment, self._n_step)
        block = observation_block(fragment, self.frame_stack, context=self.frame_stack + self._n_step - 2)
        first = max(fragment.context - self._repeated, 0)  # step of the first sum that may be whole
        num_steps, known = len(fragment.reward) - first, fragment.context - first
        start = block.row[-1 - num_steps : -1]  # [S, N]
        steps = fragment.reward[first:], fragment.terminated[first:], fragment.truncated[first:]
        returns, discount, k = n_step_return(*steps, gamma=self._gamma, n=self._n_step)
        step = np.arange(num_steps)[:, None]
        last = step + k - 1  # [S, N] the last step of each sum
        is_whole = (k == self._n_step) | np.take_along_axis(fragment.ended[first:], last, axis=0)
        # Others were items before, or will be.
        is_item = np.where(is_whole, last >= known, step < num_steps - self._repeated)
        bootstrap = np.take_along_axis(block.next_row[-num_steps:], last, axis=0)
        td_error = None
        if (values := reported_values(fragment)) is not None:
            action_value, state_value = (value[first:] for value in values)
            is_unseen = np.take_along_axis(fragment.truncated[first:], last, axis=0) | (last == num_steps - 1)
            next_value = np.take_along_axis(state_value, last + 1 - is_unseen, axis=0)
            td_error = np.abs(returns + discount * next_value - action_value)[is_item]
        items: Columns = {
            "row": start[is_item],
            "ahead": (bootstrap - start)[is_item].astype(np.int32),
            "action": fragment.action[first:][is_item],
            "n_step_return": returns[is_item],
            "bootstrap_discount": discount[is_item],
        }
        if self._hindsight is not None:
            items = self._hindsight.extend(items, fragment, block, gamma=self._gamma)
            return Cut(block, items, num_rewards=len(items["row"]))
        return Cut(block, items, td_error=td_error, num_rewards=int(k[is_item].sum()))

    def plan(self, items: Columns, steps: Ring, rows: Rows) -> Callable[[], Batch]:
        """Look up what B items need; the result gathers them, in any thread."""
        read = rows.plan(np.array([items["row"], items["row"] + items["ahead"]]))  # [2, B]

        def gather() -> Batch:
            both = read()  # [2, B, *I]
            if self._hindsight is not None:
                both[..., self._hindsight.goals.desired] = items["goal"]
            observation, next_observation = both
            return Batch(
                observation=observation,
                action=items["action"],
                n_step_return=items["n_step_return"],
                bootstrap_discount=items["bootstrap_discount"],
                next_observation=next_observation,
            )

        return gather

    def check_valid(self, items: Columns, steps: Columns, *, rows: range, step: int) -> None:
        """Assert the invariants of one fragment's items, whose observations are `rows`."""
        start, bootstrap = items["row"], items["row"] + items["ahead"]
        if self._hindsight is None:
            assert len(np.unique(start)) == len(start), "each transition starts at its own row"
        is_inside = (rows.start <= start) & (start < bootstrap) & (bootstrap < rows.stop)
        assert np.all(is_inside), "rows are its fragment's"
        discount = items["bootstrap_discount"]
        assert np.all((discount >= 0) & (discount <= np.float32(self._gamma))), "discounts in [0, gamma]"


def expected_rows(capacity: int, *, context: int = 0, steps: int = 8) -> int:
    """Return the observations of `capacity` transitions from fragments of T = `steps` and C = `context`.

    8 steps without context give as many as 32 steps with 3.
    """
    return capacity + -(-capacity * (context + 1) // steps)


def check_rewards(fragment: Fragment, n: int) -> None:
    """Refuse finite rewards of which `n` may sum to what float32 does not hold.

    Raises:
        ValueError: n times the largest is more.
    """
    largest = float(np.abs(fragment.reward).max(initial=0.0))
    if not largest * min(n, len(fragment.reward)) <= _MAX_RETURN:
        raise ValueError(
            f"fragment: rewards of up to {largest:.3g} have no finite sum of n_step {n}; lower env.reward_scale"
        )


def reported_values(fragment: Fragment) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
    """Return action_value and state_value [C+T, N] as the acting policy reported them; None where it did not.

    Raises:
        ValueError: only one of the columns is there, or one has another shape or dtype.
    """
    names, kind = ("action_value", "state_value"), (fragment.reward.shape, np.dtype(np.float32))
    values = [fragment.extras[name] for name in names if name in fragment.extras]
    if not values:
        return None
    if [(value.shape, value.dtype) for value in values] != [kind, kind]:
        raise ValueError(
            "fragment: action_value and state_value are not both float32 [T, N]; its worker plays another algorithm"
        )
    return values[0], values[1]
