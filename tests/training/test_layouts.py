"""Every layout is the same trainer: weights, gradients, metrics and steps are those of one rank."""

import pytest
import torch

from tests.kit.batches import ragged_batch
from tests.kit.layouts import HYBRID, LAYOUTS, PAIRS, TOGETHER
from tests.kit.reference import worst_error
from tests.kit.scenes import CUTS, KINDS, unequal
from tests.kit.tables import long

APART = tuple(name for name, cut in CUTS.items() if "prompt_sharing" not in cut.fields)
"""Cuts of models with gated delta nets, which share no prompts."""


@pytest.fixture(
    params=[
        *(pytest.param((*pair, KINDS), id="-".join(pair)) for pair in TOGETHER),
        *(long((*pair, tuple(CUTS)), id="-".join([*pair, "every cut"])) for pair in PAIRS),
        *(long((*pair, APART), id="-".join(pair)) for pair in HYBRID),
    ]
)
def pair(request, played):
    """(what one rank answered, what each rank of the layout answered, the layout)."""
    model, layout, cuts = request.param
    (alone,), _ = played(model, "alone")
    answers, _ = played(model, layout, cuts)
    return alone, answers, LAYOUTS[layout]


def test_every_layout_starts_from_the_same_weights(pair):
    alone, answers, _ = pair
    for answer in answers:
        assert unequal(answer["weights"], alone["weights"]) == []


def test_model_parallel_ranks_share_rows_and_data_parallel_ranks_divide_them(pair):
    _, answers, layout = pair
    ways = layout.replicate * layout.shard
    places = [answer["dp"] for answer in answers]
    assert sorted(places) == sorted([(rank, ways) for rank in range(ways)] * layout.cp * layout.tp)
    assert [answer["leader"] for answer in answers].count(True) == ways
    assert {answer["dp"][0] for answer in answers if answer["leader"]} == set(range(ways))


def test_gradients_do_not_depend_on_the_layout(pair):
    """Five rows over two or four ranks, and one row over them: some ranks run dummies."""
    alone, answers, _ = pair
    worst = {
        (cut, rank): worst_error(played["gradients"], alone["cuts"][cut]["gradients"])
        for rank, answer in enumerate(answers)
        for cut, played in answer["cuts"].items()
    }
    assert len(worst) >= len(answers) * len(KINDS)
    assert {place: error for place, error in worst.items() if not error <= 1e-5} == {}


def test_metrics_do_not_depend_on_layout_or_rank(pair):
    alone, answers, _ = pair
    for cut, first in answers[0]["cuts"].items():
        wanted = alone["cuts"][cut]
        near = [pytest.approx(expected, rel=1e-5) for expected in wanted["metrics"]]
        assert first["metrics"] == near, cut
        for answer in answers:
            assert answer["cuts"][cut]["metrics"] == first["metrics"], cut
            assert answer["cuts"][cut]["step"] == pytest.approx(wanted["step"], rel=1e-5), cut


def test_outputs_are_those_of_one_rank_on_every_rank_that_has_the_sequence(pair):
    alone, answers, layout = pair
    batch = ragged_batch()
    seen = []
    for answer in answers:
        index = batch.token_index(answer["share"])
        seen += answer["share"]
        counted = batch.loss_mask[index] | (layout.cp > 1)
        trained = answer["cuts"]["by two"]["outputs"][0]
        for name, values in alone["forward"].items():
            wanted = values[index]
            torch.testing.assert_close(answer["forward"][name], wanted, atol=1e-5, rtol=0)
            torch.testing.assert_close(trained[name], wanted * counted, atol=1e-5, rtol=0)
            assert not trained[name][~counted].any()
    assert set(seen) == set(range(len(batch)))


def test_steps_do_not_depend_on_the_layout_and_a_non_finite_gradient_skips_one(pair):
    """Only the rank that holds the broken row sees it in its own part of the batch."""
    alone, answers, _ = pair
    for answer in answers:
        for step, expected in zip(answer["steps"], alone["steps"], strict=True):
            assert step == pytest.approx(expected, rel=1e-5, nan_ok=True)
        assert answer["skipping_changed"] == []
        assert [step["version"] for step in answer["steps"]] == [1, 1, 2, 3]
        assert [step["trainer/skipped_steps"] for step in answer["steps"]] == [0, 1, 1, 1]


def test_parts_are_live_shards_from_before_the_first_forward_on(pair):
    """A publisher takes them once. FSDP's gathered copy of the head changes with no step."""
    alone, answers, _ = pair
    for answer in (alone, *answers):
        assert answer["stale_parts"] == answer["moved_parts"] == []
