import math

import pytest

from rl.observe.curves import smoothed, write_curves_png
from tests.kit.records import make_rows


def test_smoothing_keeps_constants_and_skips_nan():
    assert smoothed([2.0, math.nan, 2.0, 2.0], 2) == pytest.approx([2.0] * 4)
    assert smoothed([1.0, 5.0, 2.0], 0) == pytest.approx([1.0, 5.0, 2.0])
    assert smoothed([1.0, 4.0], 20) == pytest.approx([2.5, 2.5])
    assert smoothed([math.nan], 2) == pytest.approx([math.nan], nan_ok=True)
    assert smoothed([0.0, 0.0, 0.0, 9.0, 0.0, 0.0, 0.0], 2) == pytest.approx(
        [0.0, 1.0, 2.0, 3.0, 2.0, 1.0, 0.0]
    )


GAPS = [{"step": 1, "reward/mean": 0.1, "entropy/mean": math.nan}, {"step": 2, "timing/step": 1.0}]


@pytest.mark.parametrize("rows", [GAPS, *map(make_rows, (0, 1, 2, 300))])
def test_the_picture_is_written_for_any_number_of_steps_with_gaps(tmp_path, rows):
    write_curves_png(tmp_path / "curves.png", rows)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_staleness_and_queue_have_panels_if_generators_ran_ahead(tmp_path):
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
