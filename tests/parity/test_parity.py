"""``parity`` bitwise: trainer and generators compute the same bits of every sampled token."""

from typing import Any

import numpy as np
import pytest
import torch

from rl.generation.generator_config import GeneratorConfig
from rl.session.meshes import Meshes
from rl.session.placement import choose_cpu_settings
from rl.types import Batch, Completion
from rl.validation import validate
from tests.kit.command_line import parse
from tests.kit.generator_ranks import GeneratorRanks, request
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
    swapped,
    weights_of,
)

WINDOWS = "windows, sinks, clamped experts"
BORDERS = [1, 2, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 254, 255, 256, 511, 512, 513, 600]
CUT = {"top_k": 20, "top_p": 0.9, "min_p": 0.01}
TRAINERS = [
    {},
    {"prompt_sharing": 8, "micro_batch_size": 8},
    {"packing": False, "micro_batch_size": 1},
    {"micro_batch_tokens": 700, "logits_mib": 1},
]
"""Ways to cut a batch."""


def engine_config(dtype: str) -> GeneratorConfig:
    """Steps take longer prompts in chunks."""
    small = {"kv_cache_gib": 0.006, "max_running_requests": 24, "max_batched_tokens": 200}
    return GeneratorConfig(dtype=dtype, threads=1, **small)


def schedules(ranks: GeneratorRanks, rng: np.random.Generator, rounds: int) -> list:
    """Return batches and temperatures of requests that were scheduled in different ways."""
    calls = []

    def run(requests, temperature=1.0, waves=1, steps=3):
        parts = [requests[n::waves] for n in range(waves)]
        (done,) = ranks.run(answers, parts, steps)
        flat = [each for part in parts for each in part]
        calls.append((batch_of(flat, done), temperature))
        return flat, done

    for n in range(rounds):
        heat = float(rng.choice([1.0, 0.7, 1.3]))
        sampling = {"temperature": heat} | (CUT if n % 2 else {})
        lengths = rng.choice(BORDERS, int(rng.choice([1, 2, 7, 30]))).tolist()
        waves = int(rng.choice([1, 2, 5]))
        run(requests_of(f"r{n}", lengths, 20, rng, **sampling), heat, waves)
        prompt = prompt_of(int(rng.choice([40, 97, 200])), rng)  # samples share its prefix
        group = [request(f"g{n}-{i}", prompt, seed=i, max_tokens=30, **sampling) for i in range(5)]
        flat, done = run(group, heat, 2)
        first, answer = flat[0].prompt_tokens, done[0].tokens  # a second turn
        turn = first + answer + prompt_of(9, rng)
        later = request(f"t{n}", turn, seed=1, max_tokens=15, **sampling)
        (again,) = ranks.run(answers, [[later]], 1)
        calls.append((batch_of([flat[0], later], [done[0], *again]), heat))
    return calls


CASES = [
    (WINDOWS, "bfloat16", 2, TRAINERS[:1]),
    *(long(name, dtype, 10, TRAINERS) for name in MODELS for dtype in ("float32", "bfloat16")),
]


@pytest.mark.parametrize(("name", "dtype", "rounds", "trainers"), CASES)
def test_no_schedule_of_requests_and_no_cut_of_a_batch_changes_a_bit(
    name, dtype, rounds, trainers, tmp_path
):
    def check_calls(model, dtype, weights, folder, calls, version=0, **trainer) -> int:
        """Check that no token of ``calls`` differs; return their number."""
        (results,) = on_ranks(1, scored, "alone", model, dtype, weights, folder, calls, trainer)
        count = 0
        for mine, seen, trained, _ in results:
            assert differing(mine, seen, version) == 0
            assert differing(mine, trained, version) == 0
            count += int((mine.loss_weights > 0).sum())
        return count

    model, rng = MODELS[name], np.random.default_rng(1)
    weights, later = weights_of(model, 0), weights_of(model, 1)
    ranks = GeneratorRanks(engine_config(dtype), model, parity="bitwise")
    try:
        ranks.run(load, weights, 0)
        calls = schedules(ranks, rng, rounds)
        many = requests_of("many", rng.choice(BORDERS[:12], 6 * rounds).tolist(), 60, rng)
        (done,) = ranks.run(answers, [many], 1)
        calls.append((batch_of(many, done), 1.0))
        requests = requests_of("swap", [5, 31, 64], 40, rng)
        (done,) = ranks.run(swapped, requests, later, 17)
    finally:
        ranks.close()
    swaps = [(batch_of(requests, done), 1.0)]
    for trainer in trainers:
        count = check_calls(model, dtype, weights, str(tmp_path), calls, **trainer)
        assert count > 500 * rounds
    check_calls(model, dtype, weights, str(tmp_path), swaps, 0)
    check_calls(model, dtype, later, str(tmp_path), swaps, 1)


@pytest.mark.parametrize("name", ["dense", WINDOWS])
def test_gradients_are_those_of_a_close_trainer(name, tmp_path):
    model, rng = MODELS[name], np.random.default_rng(2)
    weights = weights_of(model, 0)
    calls = [(invented([70, 20, 130], rng), 0.7)]
    given = "alone", model, "float32", weights, str(tmp_path), calls
    ((exact,),), ((close,),) = (
        on_ranks(1, scored, *given, {"parity": parity}) for parity in ("bitwise", "close")
    )
    for parameter, gradient in close[-1].items():
        torch.testing.assert_close(exact[-1][parameter], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_data_parallel_ranks_compute_the_bits_of_one_rank(dtype, tmp_path):
    model, rng = MODELS["experts"], np.random.default_rng(3)
    weights = weights_of(model, 0)
    batch = invented([70, 20, 130, 8], rng)
    given = model, dtype, weights, str(tmp_path), [(batch, 1.0)], {}
    (((_, alone, _, _),),) = on_ranks(1, scored, "alone", *given)
    for ((mine, own, trained, _),) in on_ranks(2, scored, "fsdp2", *given):
        assert torch.equal(own, alone[batch.token_index(mine.rows)])
        assert torch.equal(own * mine.loss_mask, trained)


@pytest.mark.parametrize("parity", ["close", "bitwise"])
def test_the_config_chooses_the_bits_of_both_sides(parity, tmp_path):
    config = parse("--parity", parity)
    validate(config)
    session = config.session()
    choose_cpu_settings(session)
    meshes = Meshes(session, None, tmp_path)
    generator, trainer = meshes.generator(0), meshes.models()["trainer"]
    assert generator._arguments()[-1]["parity"] == trainer.engine.parity == parity
    assert config.watchdog_limits().parity == ("warn" if parity == "bitwise" else None)


def invented(lengths: list[int], rng: np.random.Generator) -> Batch:
    """Return a batch of prompts of these ``lengths`` and answers of half of them."""
    requests = requests_of("none", lengths, 1, rng)
    answers = [prompt_of(n // 2, rng) for n in lengths]
    given: Any = {"finish_reason": "length"}
    done = [
        Completion(tokens=each, logprobs=[0.0] * len(each), versions=[0] * len(each), **given)
        for each in answers
    ]
    return batch_of(requests, done)
