"""Layouts of the trainer under ``parity`` bitwise, each against the same sampled tokens."""

from typing import Any

import numpy as np
import pytest
from torchtitan.config import TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from rl.types import Batch
from tests.kit.generator_ranks import GeneratorRanks, request
from tests.kit.layouts import LAYOUTS
from tests.kit.ranks import on_ranks
from tests.kit.tables import long
from tests.parity.sides import (
    MODELS,
    answers,
    batch_of,
    differing,
    load,
    prompt_of,
    requests_of,
    scored,
    weights_of,
)
from tests.parity.test_parity import CUT, WINDOWS, engine_config

ROUNDED = TrainingConfig(dtype="bfloat16", mixed_precision_param="bfloat16")
TRAINERS: dict[str, tuple[str, dict[str, Any]]] = {
    "FSDP 2": ("fsdp2", {}),
    "FSDP 4": ("fsdp4", {}),
    "HSDP 2 x 2": ("hsdp4", {}),
    "DDP 2": ("ddp2", {}),
    "HSDP, recomputed": ("hsdp4", {"activation_checkpoint": FullAC.Config()}),
    "FSDP, partly recomputed": ("fsdp2", {"activation_checkpoint": SelectiveAC.Config()}),
    "DDP, a sequence for each row": ("ddp2", {"packing": False, "micro_batch_size": 1}),
    "FSDP, cut by tokens": ("fsdp2", {"micro_batch_tokens": 700, "logits_mib": 1}),
    "FSDP, shared prompts": ("fsdp2", {"prompt_sharing": 8, "micro_batch_size": 8}),
    "FSDP 4, skipped sequences": ("fsdp4", {"zero_gradient": "skip"}),
    "FSDP, bfloat16 weights": ("fsdp2", {"training": ROUNDED}),
    "one rank, many sequences": ("alone", {"micro_batch_size": 64}),
}
"""Layouts and fields of trainers."""
OFTEN = ("HSDP, recomputed", "FSDP, shared prompts")
"""Those of the default tests."""


def sampled(name: str, dtype: str) -> tuple[dict, list[tuple[Batch, float]]]:
    """Return weights of a model, and batches with the temperatures of their sampling: prompts
    around the borders of blocks, samples of one prompt, and a second turn.
    """
    rng = np.random.default_rng(5)
    weights = weights_of(MODELS[name], 0)
    ranks = GeneratorRanks(engine_config(dtype), MODELS[name], parity="bitwise")
    calls = []
    try:
        ranks.run(load, weights, 0)
        for heat, cut in ((1.0, {}), (0.7, CUT)):
            sampling = {"temperature": heat} | cut
            alone = requests_of(f"a{heat}", [1, 16, 33, 64, 129, 300], 20, rng, **sampling)
            prompt = prompt_of(97, rng)
            given: dict[str, Any] = {"max_tokens": 30, **sampling}
            group = [request(f"g{heat}-{i}", prompt, seed=i, **given) for i in range(5)]
            (done,) = ranks.run(answers, [group, alone], 3)
            first = prompt + done[0].tokens
            turn = [request(f"t{heat}", first + prompt_of(9, rng), seed=1, **given)]
            (again,) = ranks.run(answers, [turn], 1)
            calls.append((batch_of([*group, *alone, *turn], [*done, *again]), heat))
    finally:
        ranks.close()
    return weights, calls


def check(row: str, name: str, dtype: str, weights, calls, folder: str) -> None:
    """Check that no rank of a row of TRAINERS has a token with other bits."""
    layout, fields = TRAINERS[row]
    if "zero_gradient" in fields:
        for batch, _ in calls:
            batch.loss_weights[batch.token_index(range(0, len(batch), 3))] = 0
    given = layout, MODELS[name], dtype, weights, folder, calls, fields
    ranks = on_ranks(LAYOUTS[layout].ranks, scored, *given)
    for number, (batch, _) in enumerate(calls):
        results = [results[number] for results in ranks]
        for mine, *sides, _ in results:
            assert [differing(mine, side) for side in sides] == [0, 0]
        parts = [int((mine.loss_weights > 0).sum()) for mine, *_ in results]
        assert sum(parts) == int((batch.loss_weights > 0).sum()) > 150


@pytest.mark.parametrize("rows", [OFTEN, long(TRAINERS)], ids=len)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(WINDOWS, "bfloat16"), long("dense", "float32")],
)
def test_every_layout_has_the_bits_that_were_sampled(name, dtype, rows, tmp_path):
    weights, calls = sampled(name, dtype)
    for row in rows:
        if "training" in TRAINERS[row][1] and dtype == "float32":
            continue
        copies = [(batch.select(range(len(batch))), heat) for batch, heat in calls]
        check(row, name, dtype, weights, copies, str(tmp_path))
