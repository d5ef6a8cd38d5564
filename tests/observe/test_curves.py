import math

import pytest

from rl.observe.curves import reward_curve_text, smoothed, write_curves_png
from tests.observe.rows import make_rows


def test_the_text_curve_has_title_axes_and_a_line_that_climbs():
    text = reward_curve_text(make_rows(100), width=60, height=13)
    lines = text.splitlines()
    assert len(lines) == 13
    assert max(map(len, lines)) <= 60
    assert "mean reward per step" in lines[0]
    assert lines[1].startswith("1.00 ┤") and lines[10].startswith("0.00 ┤")
    assert lines[-1].split() == ["step", "1", "100"]
    heights = [
        next(row for row in range(1, 11) if lines[row].ljust(60)[column] != " ")
        for column in range(6, 60)
    ]
    assert heights == sorted(heights, reverse=True)
    assert (heights[0], heights[-1]) == (10, 1)


@pytest.mark.parametrize("width", [20, 72, 200])
@pytest.mark.parametrize("height", [6, 10, 14, 30])
def test_the_text_curve_fits_the_space_it_is_given(width, height):
    lines = reward_curve_text(make_rows(50), width=width, height=height).splitlines()
    assert len(lines) <= height
    assert max(map(len, lines[1:])) <= width


@pytest.mark.parametrize(
    "rewards",
    [[0.3], [0.0] * 5, [-3.0, -3.0], [-300.0, 4000.0], [1e-7, 2e-7], [0.1, math.nan, 0.2]],
)
def test_the_text_curve_takes_any_rewards(rewards):
    text = reward_curve_text(
        [{"step": step, "reward/mean": reward} for step, reward in enumerate(rewards)]
    )
    assert "└─" in text


@pytest.mark.parametrize("rows", [[], [{"step": 1}], [{"step": 1, "reward/mean": math.nan}]])
def test_the_text_curve_of_nothing_says_so(rows):
    assert reward_curve_text(rows) == "no rewards yet"


def test_smoothing_keeps_constants_and_passes_over_what_is_not_finite():
    assert smoothed([2.0, math.nan, 2.0, 2.0], 2) == pytest.approx([2.0] * 4)
    assert smoothed([1.0, 5.0, 2.0], 0) == [1.0, 5.0, 2.0]
    assert smoothed([0.0, 0.0, 0.0, 9.0, 0.0, 0.0, 0.0], 2) == pytest.approx(
        [0.0, 1.0, 2.0, 3.0, 2.0, 1.0, 0.0]
    )


@pytest.mark.parametrize("count", [0, 1, 2, 300])
def test_the_picture_is_written_for_any_number_of_steps(tmp_path, count):
    write_curves_png(tmp_path / "curves.png", make_rows(count))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_takes_gaps_and_missing_metrics(tmp_path):
    rows = [
        {"step": 1, "reward/mean": 0.1, "entropy/mean": math.nan},
        {"step": 2, "timing/step": 1.0},
    ]
    write_curves_png(tmp_path / "curves.png", rows)
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_staleness_and_the_queue_get_panels_where_a_run_was_ahead(tmp_path):
    def height(**ahead: float) -> int:
        write_curves_png(tmp_path / "curves.png", [{**row, **ahead} for row in make_rows(10)])
        return int.from_bytes((tmp_path / "curves.png").read_bytes()[20:24])

    lockstep = height(**{"rollout/staleness_mean": 0.0, "ledger/finished": 0.0})
    assert height(**{"rollout/staleness_mean": 0.5}) == 10 / 7 * lockstep
    assert height(**{"ledger/finished": 3.0}) == 10 / 7 * lockstep


def test_evaluations_are_dots_among_the_rewards(tmp_path):
    evaluations = [
        {"step": 5, "eval/exact_match": 0.2},
        {"step": 10, "eval/exact_match": math.nan},
        {"step": 11},
    ]
    pictures = []
    for shown in ([], evaluations[1:], evaluations[:1]):
        write_curves_png(tmp_path / "curves.png", make_rows(10), shown)
        pictures.append((tmp_path / "curves.png").read_bytes())
    assert len(set(pictures)) == 3
    write_curves_png(tmp_path / "curves.png", [], evaluations)
