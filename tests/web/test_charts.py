"""Thinned lines and columns for charts."""

from __future__ import annotations

import numpy as np
import pytest
from redis import Redis
from support.store import add_history, make_run

from ddrl.runs import records
from ddrl.runs.curves import trailing_mean
from ddrl.web import charts


def test_a_thinned_line_keeps_its_ends_and_its_peaks() -> None:
    x = np.arange(100_000.0)
    y = np.sin(x / 5_000)
    y[31_234], y[77_777] = 9.0, -9.0
    thin_x, thin_y = charts.thin((x, y), 500)
    assert len(thin_x) == 500 and (np.diff(thin_x) > 0).all()
    assert (thin_x[0], thin_x[-1]) == (0.0, 99_999.0)
    assert {31_234.0, 77_777.0} <= set(thin_x.tolist())
    assert np.array_equal(y[thin_x.astype(int)], thin_y)


@pytest.mark.parametrize("num", [0, 1, 2, 999, 1_000])
def test_a_short_line_stays_as_it_is(num: int) -> None:
    line = np.arange(float(num)), np.ones(num)
    assert charts.thin(line) is line


def test_columns_share_their_x() -> None:
    first = np.array([1.0, 2.0, 4.0]), np.array([10.0, 20.0, 40.0])
    second = np.array([2.0, 3.0]), np.array([-2.0, -3.0])
    assert charts.columns(first, second) == [
        [1.0, 2.0, 3.0, 4.0], [10.0, 20.0, None, 40.0], [None, -2.0, -3.0, None],
    ]  # fmt: skip
    assert charts.columns(*[(np.array([]), np.array([]))] * 2) == [[], [], []]


@pytest.mark.parametrize("over", charts.AXES)
def test_the_chart_of_a_run(client: Redis, over: str) -> None:
    run = make_run(client)
    add_history(client, run)
    found = records.read(client, run)
    x, training, mean, low, high = charts.of_run(found, over)["data"]
    assert x == sorted(set(x)) and len(training) == len(x)
    last = trailing_mean([row["return"] for row in found.episodes])[-1]
    assert [value for value in training if value is not None][-1] == pytest.approx(last)
    evaluated = [row for row in zip(mean, low, high, strict=True) if row[0] is not None]
    std = found.evaluated[-1]["return_std"]
    assert evaluated[-1] == pytest.approx((205.0, 205.0 - std, 205.0 + std), abs=1.0)
    if over == "updates":  # of the learner's at these steps
        assert x[0] < 3_000 and x[-1] == 7_600


def test_a_run_without_history_has_an_empty_chart(client: Redis) -> None:
    found = records.read(client, make_run(client, stop={}))
    for over in charts.AXES:
        assert charts.of_run(found, over)["data"] == [[], [], [], [], []]
        assert charts.of_figure(found, over, "staleness")["data"] == [[], []]


def test_a_figure_that_is_no_number_is_left_out(client: Redis) -> None:
    run = make_run(client)
    add_history(client, run)
    found = records.read(client, run)
    found.figures[0] |= {"staleness": float("nan"), "note": "x"}
    assert charts.of_figure(found, "env_steps", "staleness")["data"] == [[30_000.0], [0.8]]


def test_a_sparkline_is_as_high_as_it_may_be() -> None:
    points = [tuple(map(float, point.split(","))) for point in charts.sparkline([1, 3, 2]).split()]
    assert points == [(0.0, 26.0), (60.0, 2.0), (120.0, 14.0)]
    assert charts.sparkline([1.0]) == charts.sparkline([]) == ""
    assert len(charts.sparkline([5.0, 5.0, float("nan")]).split()) == 2
