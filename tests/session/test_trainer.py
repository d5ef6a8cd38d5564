"""The trainer mesh takes and returns whole batches, whatever its ranks do with them."""

import time

import pytest
import torch

from rl.algorithms.losses import grpo
from rl.model.digest import merge_digests
from rl.observe.events import Events
from rl.observe.spans import Stopwatch
from tests.session.open_actors import OpenTrainer
from tests.session.sessions import batch


@pytest.fixture(scope="module")
def trainer(common):
    return common.trainer


async def on_policy(trainer):
    """Return a batch with the log-probs of the present weights: no ratio is clipped."""
    given = batch()
    given.columns["behaviour_logprobs"] = (await trainer.forward(given))["logprobs"]
    return given


async def test_outputs_are_in_the_batchs_order(sessions, trainer):
    together = await trainer.forward(batch(), temperature=0.7)
    trained, metrics = await trainer.forward_backward(batch(), grpo(), temperature=0.7)
    alone = [
        await trainer.forward(batch().select([row]), temperature=0.7) for row in range(len(batch()))
    ]
    for name in ("logprobs", "entropy"):
        wanted = torch.cat([outputs[name] for outputs in alone])
        assert wanted.unique().numel() > len(batch())
        torch.testing.assert_close(together[name], wanted, atol=1e-5, rtol=0)
        torch.testing.assert_close(trained[name], wanted, atol=1e-5, rtol=0)
    assert metrics["entropy/mean"] > 0


async def test_each_part_of_a_batch_is_sent_once(sessions, trainer):
    """Four ranks, two data-parallel: each second rank gets its part from the first."""
    await trainer.call(OpenTrainer.watch_payloads)
    await trainer.forward(batch())
    payloads = await trainer.call(OpenTrainer.payloads)
    assert [rank[0] > 0 for rank in payloads] == [True, False, True, False]
    assert sum(rank[0] for rank in payloads) == len(batch().tokens)


async def test_every_rank_reports_the_times_of_its_own_work(sessions, trainer):
    """The other tests use a session whose events are printed; this one listens to them."""
    events = []
    trainer.watch = Stopwatch(Events(events.append))
    began = time.time()
    await trainer.forward_backward(batch(), grpo())
    await trainer.optim_step(lr=0.0)
    ended = time.time()
    found = {(each["process"], each["name"]) for each in events}
    names = ("forward_backward", "optim_step")
    assert found == {(f"trainer[{rank}]", name) for rank in range(4) for name in names}
    for each in events:
        assert began <= each["begin"] <= each["end"] <= ended + 0.001


async def test_options_and_residency_reach_every_rank(sessions, trainer):
    await trainer.forward_backward(batch(), grpo())
    before = merge_digests(await trainer.weight_digests())
    version = trainer.version
    await trainer.offload()
    await trainer.onload()
    assert merge_digests(await trainer.weight_digests()) == before
    metrics = await trainer.optim_step(lr=0.0)
    assert trainer.version == version + 1
    assert metrics["trainer/lr/AdamW"] == 0.0
    assert merge_digests(await trainer.weight_digests()) == before


async def test_eps_of_a_step_reaches_every_rank(sessions, trainer):
    digests = []
    for eps in (1e30, 1e-8):
        await trainer.forward_backward(await on_policy(trainer), grpo())
        before = merge_digests(await trainer.weight_digests())
        await trainer.optim_step(lr=1e-2, eps=eps, weight_decay=0.0)
        digests.append(merge_digests(await trainer.weight_digests()) == before)
    assert digests == [True, False]


async def test_weight_of_a_batch_scales_its_gradient_alone(sessions, trainer):
    rows = []
    given = await on_policy(trainer)
    for weight in (1.0, 2.0, 0.0):
        await trainer.forward_backward(given, grpo(), weight=weight)
        rows.append(await trainer.optim_step(lr=0.0))
    norms = [row["trainer/grad_norm"] for row in rows]
    assert norms[0] > 0
    assert norms == pytest.approx([norms[0], 2 * norms[0], 0.0], rel=1e-5)
    assert len({row["trainer/weight"] for row in rows}) == 1


async def test_garbage_is_collected_every_gc_freq_steps_and_at_no_other_time(sessions, trainer):
    await trainer.call(OpenTrainer.watch_collections)
    first = trainer.version
    for _ in range(6):
        await trainer.forward_backward(batch(), grpo())
        await trainer.optim_step(lr=0.0)
    assert (first // 3 + 2) == trainer.version // 3
    assert await trainer.call(OpenTrainer.collections) == [[2, 2]] * 4
