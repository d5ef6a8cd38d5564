"""Requests train as their formulas say, however they are cut; others are errors of the client."""

import asyncio
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.tinker.custom_losses import CustomLosses
from rl.tinker.errors import BadRequest, UserError
from rl.tinker.forward_backward import Limits, batch_of, prepare, target_logprobs
from rl.tinker.graph import Graph
from rl.tinker.losses import FORMULAS, LOW
from rl.tinker.wire import parse_forward_backward
from tests.kit.reference import relative_error
from tests.kit.scenes import TIED_FUSED, engine_of, gradients_of
from tests.tinker.bodies import answer_of, csr, request
from tests.tinker.graphs import encoded

LIMITS = Limits(vocab_size=30, max_tokens=14, stand_ins=True, targets=8, cells=1 << 12)


@pytest.fixture
def engine(folder):
    return engine_of(TIED_FUSED, folder=folder, micro_batch_size=3)


def run(engine, message, **graphs: Graph):
    """Return the log-probs and metrics that a request is answered with."""

    async def forward(batch):
        return engine.forward(batch)

    async def forward_backward(batch, loss):
        return engine.forward_backward(batch, loss.build())

    work = prepare(message, LIMITS, graphs)
    losses = CustomLosses()
    try:
        return answer_of(asyncio.run(work.run(forward, forward_backward, losses.differentiate)))
    finally:
        losses.close()


def data_of(name: str, lengths=(5, 1, 14, 8), seed: int = 0, width: int = 0):
    """Return datums with every input that a loss needs."""
    draw = np.random.default_rng(seed)
    data = []
    for length in lengths:
        shape = (length, width) if width else (length,)
        inputs = {"target_tokens": draw.integers(0, 30, shape)}
        for column in FORMULAS[name].columns:
            key = column.replace("sampled_logprobs", "logprobs")
            shift = -3.0 if key == "logprobs" else 0.0
            inputs[key] = (draw.normal(size=shape) + shift).astype(np.float32)
        data.append((draw.integers(0, 30, length).tolist(), inputs))
    return data


@pytest.mark.parametrize("name", FORMULAS)
def test_chunks_add_up_to_one_call(engine, name):
    data = data_of(name)
    scored, alone = run(engine, request(data, name, only=True))
    assert all(each.grad is None for each in engine.model.parameters())
    whole, metrics = run(engine, request(data, name))
    assert metrics == {"loss:sum": pytest.approx(alone["loss:sum"], rel=1e-5)}
    for found, wanted in zip(scored, whole, strict=True):
        assert found == pytest.approx(wanted, abs=1e-6)
    wanted = gradients_of(engine)
    engine.optimizers.zero_grad()
    total = 0.0
    for part in (data[3:], data[:1], data[1:3]):
        total += run(engine, request(part, name))[1]["loss:sum"]
    assert total == pytest.approx(metrics["loss:sum"], rel=1e-5)
    assert relative_error(gradients_of(engine), wanted) <= 1e-6


def test_datums_of_one_and_of_several_targets_are_scored_together(engine):
    """Sparse and dense targets of unequal width, and targets other than the next token."""
    single = data_of("cross_entropy", (5, 3))
    pairs = data_of("cross_entropy", (4, 7), seed=1, width=2)
    wide = data_of("cross_entropy", (6,), seed=2, width=3)
    sparse = [(tokens, {name: csr(each) for name, each in own.items()}) for tokens, own in wide]
    data = [single[0], pairs[0], wide[0], single[1], pairs[1]]
    found, metrics = run(engine, request([*data[:2], *sparse, *data[3:]]))
    wanted = gradients_of(engine)
    engine.optimizers.zero_grad()
    apart = [run(engine, request([each])) for each in data]
    assert relative_error(gradients_of(engine), wanted) <= 1e-6
    assert metrics["loss:sum"] == pytest.approx(sum(m["loss:sum"] for _, m in apart), rel=1e-5)
    for values, ((own,), _), (_, inputs) in zip(found, apart, data, strict=True):
        assert values.shape == own.shape == inputs["target_tokens"].shape
        assert values == pytest.approx(own, abs=1e-5)


def test_scores_are_log_probs_of_the_ids_that_are_named(engine):
    tokens = [np.array([3, 1, 4, 1, 5]), np.array([9])]
    targets = [np.arange(30).reshape(1, 30).repeat(5, 0), np.full((1, 2), -1)]
    batch = batch_of(tokens, targets)
    rows, empty = target_logprobs(engine.forward(batch), targets)
    assert np.exp(rows).sum(1) == pytest.approx(np.ones(5), abs=1e-5)
    assert empty.tolist() == [[0.0, 0.0]]


def importance(logprobs, logprobs_of_sampler, advantages):
    ratio = torch.exp(logprobs - logprobs_of_sampler)
    return -(ratio * advantages).sum(), {
        "custom/ratio:mean": ratio.mean(),
        "custom/count:sum": ratio.numel(),
    }


@pytest.mark.parametrize("only", [False, True])
def test_a_custom_loss_trains_as_the_same_loss_of_the_protocol(engine, only):
    def as_custom(data):
        names = {"logprobs": "logprobs_of_sampler"}
        return [
            (tokens, {names.get(n, n): each for n, each in own.items()}) for tokens, own in data
        ]

    data = data_of("importance_sampling")
    graph = Graph.of(**encoded(importance))
    plain, wanted = run(engine, request(data, "importance_sampling", only=only))
    gradients = None if only else gradients_of(engine)
    engine.optimizers.zero_grad()
    message = request(as_custom(data), "custom", only=only, loss_id="s:loss:0")
    found, metrics = run(engine, message, **{"s:loss:0": graph})
    assert metrics.pop("loss:sum") == pytest.approx(wanted["loss:sum"], rel=1e-5)
    ratios = [
        np.exp(one - own["logprobs"]).mean() for one, (_, own) in zip(plain, data, strict=True)
    ]
    assert metrics["custom/ratio:mean"] == pytest.approx(np.mean(ratios), rel=1e-5)
    assert metrics["custom/count:sum"] == 28
    for one, other in zip(found, plain, strict=True):
        assert one == pytest.approx(other, abs=1e-6)
    if not only:
        assert relative_error(gradients_of(engine), gradients) <= 1e-5


def test_a_custom_loss_that_fails_leaves_the_gradient_as_it_was(engine):
    def root(logprobs, advantages):
        return (logprobs * torch.sqrt(advantages)).sum(), {}

    data = data_of("importance_sampling")
    run(engine, request(data, "importance_sampling"))
    before = gradients_of(engine)
    for _, inputs in data:
        del inputs["logprobs"]
    message = request(data, "custom", loss_id="a")
    with pytest.raises(UserError, match=r"datum \d: the loss or its gradient is not finite"):
        run(engine, message, a=Graph.of(**encoded(root)))
    after = gradients_of(engine)
    assert all(torch.equal(after[name], each) for name, each in before.items())


def changed(loss: str, place: int = 1, config=None, **inputs):
    """Return a request in which one datum has other inputs; None removes one."""
    data = data_of(loss, (4, 3))
    own = data[place][1] | inputs
    own = {name: each for name, each in own.items() if each is not None}
    data[place] = (data[place][0], own)
    return partial(request, data, loss, **(config or {}))


NAN = np.full(3, np.nan, np.float32)
REFUSED = {
    "has 0 datums; limit: 4,096": partial(request, []),
    "datum 0 has 0 tokens, not 1 to 14": partial(request, [([], {})]),
    "datum 0 has 15 tokens": partial(request, [([1] * 15, {})]),
    "datum 0 has a token outside the vocabulary of 30": partial(
        request, [([30], {"target_tokens": [1]})]
    ),
    "datum 1 has a token outside": changed("ppo", target_tokens=[1, 2, -1]),
    r"3 tokens: target_tokens must be int64 \[3\] or": changed("ppo", target_tokens=None),
    r"target_tokens must be int64 \[3\] ": changed("ppo", target_tokens=[1.0, 2.0, 3.0]),
    r"target_tokens must be int64 \[3\]  ": changed("ppo", target_tokens=[1, 2]),
    "with K up to 8": changed("cross_entropy", target_tokens=np.zeros((3, 9), np.int64)),
    r"at most 4,\d\d\d cells": changed("ppo", logprobs=np.zeros((4, 2000), np.float32)),
    r"advantages must have the shape \[3\]": changed("ppo", advantages=None),
    r"advantages must have the shape \[3\] ": changed("ppo", advantages=[1.0, 2.0]),
    "advantages has a number that is not finite": changed("dro", advantages=NAN),
    r"datum 1: ppo does not read \['mask'\]": changed("ppo", mask=[1.0, 1.0, 1.0]),
    r"dro does not read \['clip_low_threshold'\]": changed("dro", clip_low_threshold=[0.5]),
    "a negative threshold": changed("ppo", 0, clip_low_threshold=[-0.5]),
    "sequence_ratio_mask must have an entry": changed("gspo", sequence_ratio_mask=[0, 0, 0]),
    "ppo has one target for each token": changed("ppo", target_tokens=np.ones((3, 2), np.int64)),
    "'nll' is not served; served are": partial(request, data_of("ppo"), "nll"),
    "has beta=0.5; it takes": changed("ppo", config={"beta": 0.5}),
    "has clip_low_threshold='x'": changed("ppo", config={"clip_low_threshold": "x"}),
    "has beta=nan": changed("dro", config={"beta": float("nan")}),
    "'custom' takes one setting": partial(request, data_of("ppo"), "custom"),
    "'custom' takes one setting ": partial(request, data_of("ppo"), "custom", loss_id="other"),
}
"""Requests by what the error says."""


@pytest.mark.parametrize("text", REFUSED)
def test_a_request_that_cannot_work_is_refused_in_a_sentence(text):
    with pytest.raises(UserError, match=text.rstrip()):
        prepare(REFUSED[text](), LIMITS, {})


def test_a_setting_holds_for_tokens_without_a_number_of_their_own():
    data = data_of("ppo", (3, 2, 1))
    data[0][1][LOW] = [0.1, 0.2, 0.3]
    data[1][1][LOW] = [0.5]
    message = request(data, "ppo", **{LOW: 0.75})
    columns = prepare(message, LIMITS, {}).batch.columns
    wanted = [0, 0.1, 0.2, 0.3, 0, 0.5, 0.5, 0, 0.75]
    assert columns[LOW].tolist() == pytest.approx(wanted)
    assert columns["clip_high_threshold"].tolist() == pytest.approx([1.2 * (x > 0) for x in wanted])


def test_images_are_refused_and_so_is_padding_without_end():
    message = request(data_of("cross_entropy", (4,)))
    message.data[0].model_input[0].image.format = "png"
    with pytest.raises(UserError, match="datum 0 has a chunk of type image; only text"):
        prepare(message, LIMITS, {})
    narrow = data_of("cross_entropy", (14,) * 60)
    wide = data_of("cross_entropy", (1,), width=8)
    with pytest.raises(UserError, match="the targets have 6,728 cells; limit: 4,096"):
        prepare(request([*narrow, *wide]), LIMITS, {})


@settings(max_examples=200, derandomize=True)
@given(data=st.data())
def test_any_bytes_are_a_request_or_an_error_of_the_client(data):
    """Bytes of a request of which some are changed, cut out or put in."""
    name = data.draw(st.sampled_from(["cross_entropy", "gspo"]))
    body = bytearray(request(data_of(name, (3, 2)), name).SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(body) - 1))
        end = place + data.draw(st.sampled_from([0, 1, 1, 1, 4, 30]))
        body[place:end] = data.draw(st.binary(max_size=4))
    try:
        work = prepare(parse_forward_backward(bytes(body)), LIMITS, {})
    except (BadRequest, UserError) as error:
        assert str(error)
    else:
        lengths = [len(each["target_tokens"]) + 1 for each in work.inputs]
        assert work.batch.lengths.tolist() == lengths
