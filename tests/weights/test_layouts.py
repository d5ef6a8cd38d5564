"""Any trainer layout pushes to any generator layout, bit for bit; and layouts are known before ranks run."""

import pytest
import torch.distributed as dist

from rl.model.parts import Layout
from rl.training.config import TrainerConfig
from rl.training.layout import trainer_layout
from tests.training.ranks import on_ranks
from tests.weights.pushes import MODELS, TRAINERS, push_all

CASES = [
    (model, layout)
    for layout, degrees in TRAINERS.items()
    for model, config in MODELS.items()
    if config.num_experts or degrees.ep == 1
]
RANKS = sorted({layout.ranks for layout in TRAINERS.values()})


def planned(model: str, layout: str) -> tuple[Layout, ...]:
    return trainer_layout(TrainerConfig(parallelism=TRAINERS[layout].parallelism), MODELS[model])


@pytest.fixture(scope="module", params=RANKS, ids=lambda ranks: f"{ranks} ranks")
def pushed(request, tmp_path_factory) -> dict[tuple[str, str], list[Layout]]:
    """By (model, trainer layout) what each rank held; the ranks have pushed it to all generators and compared."""
    cases = [case for case in CASES if TRAINERS[case[1]].ranks == request.param]
    folder = str(tmp_path_factory.mktemp("pushed"))
    ranks = on_ranks(request.param, push_all, cases, folder)
    return dict(zip(cases, zip(*ranks, strict=True), strict=True))


def test_every_reader_holds_its_part_of_every_version_bit_for_bit(pushed):
    assert len(pushed) >= 6


def test_the_layout_planned_without_ranks_is_the_one_they_have(pushed):
    for case, held in pushed.items():
        assert planned(*case) == held, case
    assert not dist.is_initialized()
