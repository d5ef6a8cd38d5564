"""Contracts C2 and C3 of the engine: honest log-probs, no stale cache, versions of tokens."""

import math
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rl.compat.vllm_internals import kv_caches
from rl.errors import ConfigError, RunError
from rl.generation.generator_config import GeneratorConfig
from rl.generation.start_vllm import RUNNER, vllm_config
from tests.kit.generator_ranks import generate, push, request, scheduler_of
from tests.kit.memory import resident
from tests.kit.policies import EXPERTS, TIED_SPLIT, UNTIED_SPLIT, Policy, error
from tests.kit.tables import long

PROMPTS = [[5], list(range(1, 20)), [7] * 40, list(range(60, 0, -1)) * 2]


def asked(**sampling):
    return [request(f"p{i}", prompt, seed=i, **sampling) for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_of_the_distribution_sampled_from(one_or_two_ranks, policy, temperature):
    asks = asked(max_tokens=40, temperature=temperature)
    completions, *followers = one_or_two_ranks.run(generate, asks)
    assert all(same == completions for same in followers)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert error(policy, prompt, completion, temperature) <= 1e-5
        assert len(completion.tokens) == len(completion.logprobs) == len(completion.versions) == 40
        assert completion.finish_reason == "length"


def test_each_request_gets_as_many_of_the_most_likely_tokens_as_it_asks_for(generator, policy):
    """They share a batch. Ids of probability 0 are left out. The sampled tokens do not change."""
    asks = [
        request("none", seed=2),
        request("greedy", temperature=0.0, top_logprobs=5),
        request("warm", temperature=0.7, top_logprobs=20, seed=3),
        request("cut", min_p=0.3, top_logprobs=20, seed=4),
    ]
    ((none, *others),) = generator.run(generate, asks)
    assert none.top_logprobs is None
    shortest = []
    for each, found in zip(asks[1:], others, strict=True):
        sampling = each.sampling
        logits = policy.logits(each.prompt_tokens, found.tokens).double()
        probs = (logits / (sampling.temperature or 1.0)).softmax(1)
        probs = probs.masked_fill(probs < sampling.min_p * probs.amax(1, keepdim=True), 0.0)
        rows = (probs / probs.sum(1, keepdim=True)).log()
        assert found.top_logprobs is not None
        for row, token, logprob, top in zip(
            rows, found.tokens, found.logprobs, found.top_logprobs, strict=True
        ):
            best = row.topk(min(sampling.top_logprobs, int(row.isfinite().sum())))
            assert [*top] == best.indices.tolist()
            assert [*top.values()] == pytest.approx(best.values.tolist(), abs=1e-5)
            assert top.get(token, logprob) == logprob
            assert sampling.temperature or next(iter(top)) == token
        shortest.append(min(map(len, found.top_logprobs)))
    assert shortest[:2] == [5, 20]
    assert 1 <= shortest[2] < 20
    alone = [replace(each, sampling=replace(each.sampling, top_logprobs=0)) for each in asks]
    (same,) = generator.run(generate, alone)
    assert [each.tokens for each in same] == [each.tokens for each in (none, *others)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_of_prompts_are_those_of_the_model(one_or_two_ranks, policy, temperature):
    """At temperature 1, whatever the answer's. Cached prefixes and the numbers that other requests
    of the batch ask for make no difference, nor do prompts that take several steps.
    """
    prompts = [*PROMPTS, *([number] * 100 for number in range(3))]
    counts = [None, 0, 3, 20, 1, 0, 2]
    options = {"max_tokens": 2, "temperature": temperature}
    for _ in range(2):
        asks = [
            request(f"{index}", prompt, seed=index, prompt_logprobs=count, **options)
            for index, (prompt, count) in enumerate(zip(prompts, counts, strict=True))
        ]
        completions = one_or_two_ranks.run(generate, asks)[0]
    for prompt, count, found in zip(prompts, counts, completions, strict=True):
        assert error(policy, prompt, found, temperature) <= 1e-5
        if count is None:
            assert found.prompt_logprobs is None and found.prompt_top is None
            continue
        first, *others = found.prompt_logprobs
        assert math.isnan(first)
        rows = policy.logits(prompt[:1], prompt[1:]).log_softmax(1)
        own = rows.gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1)
        assert others == pytest.approx(own.tolist(), abs=1e-5)
        if not count:
            assert found.prompt_top is None
            continue
        assert found.prompt_top[0] == {}
        for row, top in zip(rows, found.prompt_top[1:], strict=True):
            best = row.topk(count)
            assert [*top] == best.indices.tolist()
            assert [*top.values()] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_a_prompt_of_one_token_has_no_log_prob(generator):
    ((found,),) = generator.run(generate, [request("one", [5], max_tokens=1, prompt_logprobs=3)])
    assert math.isnan(*found.prompt_logprobs)
    assert found.prompt_top == [{}]


@pytest.mark.long
def test_a_vocabulary_smaller_than_the_number_of_most_likely_tokens_is_returned_whole(one_rank):
    small = replace(TIED_SPLIT, vocab_size=16)
    one_rank.rebuild(small)
    one_rank.run(push, Policy(small, seed=2).weights, 1)
    ((found,),) = one_rank.run(generate, [request("all", top_logprobs=20)])
    assert {len(top) for top in found.top_logprobs} == {16}


def test_more_prompt_tokens_than_fit_a_step_take_several_steps(generator, policy):
    requests = [request(f"r{i}", [i + 1] * 100, max_tokens=5, seed=i) for i in range(4)]
    (completions,) = generator.run(generate, requests)
    (alone,) = generator.run(generate, [requests[3]])
    assert completions[3].tokens == alone[0].tokens
    for each, completion in zip(requests, completions, strict=True):
        assert error(policy, each.prompt_tokens, completion) <= 1e-5


@pytest.mark.parametrize("one_or_two_ranks", ["generator", long("generators")], indirect=True)
def test_chunks_prefixes_and_preemption_change_no_token(one_or_two_ranks, policy):
    asks = [
        *asked(max_tokens=60),
        request("twin", PROMPTS[3], max_tokens=60, seed=3, prompt_logprobs=2),
        request("cold", PROMPTS[3][:100], max_tokens=60, temperature=0.0),
    ]
    (whole, _), *_ = one_or_two_ranks.run(in_chunks, asks, tokens=256, room=None)
    for tokens, room in ((48, None), (37, 10)):  # the second time with hits in the prefix cache
        (cut, preemptions), *_ = one_or_two_ranks.run(in_chunks, asks, tokens=tokens, room=room)
        assert (preemptions > 0) == (room is not None)
        for each, before, after in zip(asks, whole, cut, strict=True):
            assert after.tokens == before.tokens
            assert error(policy, each.prompt_tokens, after) <= 1e-5
        assert cut[4].prompt_logprobs[1:] == pytest.approx(whole[4].prompt_logprobs[1:], abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("form", [UNTIED_SPLIT, EXPERTS], ids=["untied, split", "experts"])
def test_other_forms_of_the_model_give_the_same_logprobs_as_torchtitan(one_rank, form):
    policy = Policy(form, seed=2)
    one_rank.rebuild(form)
    one_rank.run(push, policy.weights, 1)
    (completions,) = one_rank.run(generate, asked(max_tokens=40))
    assert max(error(policy, p, c) for p, c in zip(PROMPTS, completions, strict=True)) <= 1e-5


def test_offload_frees_memory_and_a_push_restores_completions(one_or_two_ranks, policy):
    one_or_two_ranks.run(push, policy.weights, 0)
    before = one_or_two_ranks.run(generate, asked(max_tokens=20))
    for rank in one_or_two_ranks.run(away_and_back):
        assert rank["freed"] > 0.9 * rank["cache"] > 0
        assert rank["stays"]
        assert rank["lost"]
        assert rank["empty"]
    one_or_two_ranks.run(push, policy.weights, 0)
    assert one_or_two_ranks.run(generate, asked(max_tokens=20)) == before


def test_an_eager_generator_compiles_nothing(generator):
    """``enforce_eager`` is the default."""
    generator.run(generate, asked(max_tokens=2))
    assert generator.run(compiled_frames) == [0]


@pytest.mark.long
def test_a_push_in_bfloat16_leaves_the_rope_cache_in_float32(one_rank, policy):
    one_rank.rebuild(TIED_SPLIT, dtype="bfloat16")
    one_rank.run(push, policy.weights, 1)
    (caches,) = one_rank.run(rope_caches)
    for cache, layer in zip(caches, policy.model.layers.values(), strict=True):
        assert cache.dtype == torch.float32
        assert torch.equal(
            cache, layer.attention.rope.cache[:, 16:48]
        )  # vLLM keeps each angle once


def test_a_generator_without_weights_refuses_requests(one_rank):
    unpushed = one_rank.at_birth[0]
    assert unpushed["all_nan"]
    assert unpushed["refusal"] == "RunError: generator holds no weights yet: push before generate"


def test_a_weight_that_was_not_pushed_is_an_error(generator, policy):
    generator.run(push, policy.weights | {"norm.weight": torch.full((64,), torch.nan)}, 2)
    with pytest.raises(RunError, match="policy version 2 are not finite"):
        generator.run(generate, [request("nan")])


def test_a_row_with_a_nan_samples_the_first_word_and_has_no_logprob(generator):
    rows = torch.tensor([[0.0, 3.0, 1.0], [0.0, torch.nan, 1.0], [torch.nan] * 3])
    (found,) = generator.run(with_first_words, rows)
    assert torch.equal(found[0], rows[0])
    assert found[1:].argmax(1).tolist() == [0, 0]
    assert found[1:].log_softmax(1)[:, 0].isnan().all()
    assert not found.isnan().any()


def test_model_runner_v2_without_triton_is_refused(generator):
    message = "Model Runner V2 needs Triton .* or set VLLM_USE_V2_MODEL_RUNNER=0"
    with pytest.raises(ConfigError, match=message):
        generator.run(configure_v2)


def test_invalid_requests_are_refused_and_do_not_affect_others(generator):
    bad = {
        "max_seq_len 256": request("long", [1] * 250, max_tokens=7),
        "at least one": request("empty", []),
        "vocabulary of 64": request("word", [64]),
        "temperature 0.001 is not 0, .* from 0.01 to 2": request("cold", temperature=0.001),
        "temperature 2.1 is not 0, .* from 0.01 to 2": request("hot", temperature=2.1),
        "top_logprobs 21 is not from 0 to 20": request("top", top_logprobs=21),
        "prompt_logprobs -1 is not from 0 to 20": request("given", prompt_logprobs=-1),
    }
    for message, each in bad.items():
        with pytest.raises(ValueError, match=message):
            generator.run(generate, [each])
    (completions,) = generator.run(generate, [request("full", [1] * 250, max_tokens=6)])
    assert len(completions[0].tokens) == 6


def test_a_cache_that_was_not_reset_is_an_error(generator):
    with pytest.raises(RunError, match="did not reset its prefix cache for policy version 9"):
        generator.run(change_with_stuck_cache)


def test_greedy_always_takes_the_most_likely_token(generator, policy):
    runs = [
        generator.run(generate, [request("greedy", temperature=0.0, seed=seed)])[0][0]
        for seed in (1, 2)
    ]
    assert runs[0] == runs[1]
    assert error(policy, [1, 2, 3], runs[0]) <= 1e-5
    for end in range(16):
        prompt = [1, 2, 3, *runs[0].tokens[:end]]
        best = max(range(64), key=lambda token: policy.logprobs(prompt, [token]).item())
        assert runs[0].tokens[end] == best


def test_greedy_and_sampled_requests_keep_their_own_logprobs_in_one_batch(generator, policy):
    temperatures = [0.0, 0.7, 1.3]
    requests = [request(f"t{t}", temperature=t, seed=3) for t in temperatures]
    (completions,) = generator.run(generate, requests)
    for temperature, completion in zip(temperatures, completions, strict=True):
        assert error(policy, [1, 2, 3], completion, temperature or 1.0) <= 1e-5


def test_tokens_depend_on_the_seed_and_not_on_other_requests(generator):
    (alone,) = generator.run(generate, [request("a", seed=1)])
    (together,) = generator.run(
        generate, [request(f"s{seed}", seed=seed) for seed in (3, 2, 1, -1)]
    )
    assert together[2].tokens == alone[0].tokens
    assert len({tuple(completion.tokens) for completion in together}) == 4
    (again,) = generator.run(generate, [request("minus", seed=-1)])
    assert again[0].tokens == together[3].tokens


def test_the_stop_token_is_part_of_the_completion(generator):
    (free,) = generator.run(generate, [request("free", seed=5)])
    stop = free[0].tokens[4]
    (stopped,) = generator.run(generate, [request("stopped", seed=5, stop_token_ids=(stop,))])
    end = free[0].tokens.index(stop) + 1
    assert stopped[0].tokens == free[0].tokens[:end]
    assert stopped[0].logprobs == pytest.approx(free[0].logprobs[:end], abs=1e-6)
    assert stopped[0].finish_reason == "stop"
    assert len(stopped[0].versions) == end


def test_aborted_requests_are_dropped_and_their_ids_are_free(generator):
    (completions,) = generator.run(abort_one_of_two)
    assert list(completions) == ["kept"]
    (again,) = generator.run(generate, [request("dropped", max_tokens=3)])
    assert len(again[0].tokens) == 3


def test_the_cache_of_compiled_models_is_found_at_the_next_start(generator):
    ((first, second, other),) = generator.run(compile_hashes)
    assert first == second != other


# Run on the ranks.


def in_chunks(engine, requests, *, tokens: int, room: int | None):
    """Return completions of ``requests`` from steps of at most ``tokens`` tokens and ``room`` free
    blocks of the cache, and the number of preemptions.
    """
    scheduler = scheduler_of(engine)
    pool = scheduler.kv_cache_manager.block_pool
    usual = scheduler.max_num_scheduled_tokens
    scheduler.max_num_scheduled_tokens = tokens
    taken = pool.get_new_blocks(0 if room is None else pool.get_num_free_blocks() - room)
    before = engine._requests.counts["preemptions"]
    try:
        completions = generate(engine, requests)
    finally:
        pool.free_blocks(taken)
        scheduler.max_num_scheduled_tokens = usual
    return completions, engine._requests.counts["preemptions"] - before


def compiled_frames(engine) -> int:
    from torch._dynamo.utils import counters

    return counters["frames"]["total"]


def rope_caches(engine):
    return [layer.attention.rope.cache.clone() for layer in engine._model.titan.layers.values()]


def with_first_words(engine, rows: torch.Tensor) -> torch.Tensor:
    from rl.generation.vllm_model import first_word_if_nan

    return first_word_if_nan(rows)


def configure_v2(engine) -> None:
    """Make vLLM's config with Model Runner V2 in a process whose vLLM has no Triton."""
    before = os.environ[RUNNER]
    os.environ[RUNNER] = "1"
    try:
        with tempfile.TemporaryDirectory() as folder:
            vllm_config(
                GeneratorConfig(), engine.shape, Path(folder), fuse_qkv=True, seed=0, timeout_s=1
            )
    finally:
        os.environ[RUNNER] = before


def compile_hashes(engine):
    """Return what vLLM names the cache by at two starts, and at that of another model."""
    hashes = []
    for words in (64, 64, 65):
        with tempfile.TemporaryDirectory() as folder:
            shape = replace(engine.shape, vocab_size=words)
            options = {"fuse_qkv": True, "seed": 0, "timeout_s": 1}
            config = vllm_config(GeneratorConfig(), shape, Path(folder), **options)
        hashes.append(config.compute_hash())
    return hashes


def change_with_stuck_cache(engine):
    reset = engine._engine.reset_prefix_cache
    engine._engine.reset_prefix_cache = lambda **_: False
    try:
        engine.weights_changed(9)
    finally:
        engine._engine.reset_prefix_cache = reset


def abort_one_of_two(engine):
    engine.add(request("kept"))
    engine.add(request("dropped"))
    engine.step()
    engine.abort(["dropped", "never seen"])
    done = {}
    while engine.busy:
        done.update(engine.step())
    return done


def away_and_back(engine) -> dict[str, Any]:
    """Return the bytes of the cache, the bytes that an offload frees, and what is there after it.
    Both calls are repeated, which does nothing.
    """
    caches = kv_caches(engine._engine)
    live = [shard.tensor for shard in engine.parameters()]
    for cache in caches:
        cache.fill_(1)
    places = addresses(engine)
    before = resident("RssAnon")
    engine.offload()
    engine.offload()
    freed = before - resident("RssAnon")
    engine.onload()
    engine.onload()
    engine.offload()  # without weights
    engine.onload()
    storages = (cache.untyped_storage() for cache in caches)
    return {
        "cache": sum({each.data_ptr(): each.nbytes() for each in storages}.values()),
        "freed": freed,
        "stays": addresses(engine) == places,
        "lost": engine.version is None and all(tensor.isnan().all() for tensor in live),
        "empty": not any(cache.any() for cache in caches),
    }


def addresses(engine) -> list[int]:
    """Return where the weights and the KV cache are."""
    live = [shard.tensor for shard in engine.parameters()]
    return [each.data_ptr() for each in (*live, *kv_caches(engine._engine))]
