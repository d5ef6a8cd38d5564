"""Requests depend on prompt_ids alone; rollouts keep the order of their prompts."""

import asyncio
import random
from dataclasses import replace
from itertools import product

import pytest

from rl.errors import GroupLost, RunError
from rl.observe.spans import Stopwatch
from rl.rollout.rollouter import Rollouter, derive_seed
from rl.rollout.scoring import rollouts_of, score_group
from rl.tasks.base import Score
from rl.types import Completion, Prompt, Sampling

SAMPLING = Sampling(max_tokens=4, temperature=0.7, stop_token_ids=(2,))
PROMPTS = [
    Prompt(prompt_id=prompt_id, tokens=[1, prompt_id], text="", answer="")
    for prompt_id in (5, 6, 7)
]


class Echo:
    """Task with the first token as its reward."""

    def decode(self, tokens):
        return " ".join(map(str, tokens))

    def score(self, prompt, text, completion):
        return Score(
            reward=float(text.split()[0]), correct=prompt.prompt_id == 6, metrics={"tokens": 1.0}
        )


async def score(prompt, completions):
    if prompt.prompt_id == 9:
        raise GroupLost("reward raised", "nine has no reward")
    await asyncio.sleep(0.001 * (7 - prompt.prompt_id))  # the first prompt's group is scored last
    return rollouts_of(prompt, completions, score_group(Echo(), prompt, completions))


class Recorder:
    """Generator of completions of one token, ten times the prompt_id plus the sample, in the order
    of the requests.
    """

    def __init__(self):
        self.requests = []

    async def __call__(self, requests):
        self.requests += requests
        await asyncio.sleep(0)
        places = [tuple(map(int, request.request_id.split("/")[-2:])) for request in requests]
        return [
            Completion(
                tokens=[10 * prompt_id + sample], logprobs=[0.0], versions=[0], finish_reason="stop"
            )
            for prompt_id, sample in places
        ]


def test_the_first_lost_group_of_each_kind_is_reported_and_all_are_counted():
    async def fail(prompt, completions):
        error = ZeroDivisionError("none today") if prompt.prompt_id % 2 else KeyError("seven")
        return score_group(Moody(error if prompt.prompt_id < 20 else None), prompt, completions)

    shown = []
    rollouter = Rollouter(fail, seed=0, watch=Stopwatch(), warn=shown.append)
    prompts = [replace(PROMPTS[0], prompt_id=prompt_id) for prompt_id in range(24)]
    groups = asyncio.run(rollouter.collect(prompts, SAMPLING, samples=1, generate=Recorder()))
    assert all(isinstance(group, GroupLost) for group in groups)
    assert rollouter.lost == {
        "reward raised (KeyError)": 10,
        "reward raised (ZeroDivisionError)": 10,
        "reward was invalid": 4,
    }
    first, second, third = shown
    assert first.startswith(
        "the reward of Moody raised KeyError: 'seven'; prompt 0, sample 0, completion "
        "'0'\nTraceback"
    )
    assert "test_rollouter.py" in first
    assert first.endswith("the group is lost; more groups of this kind are only counted")
    assert second.startswith("the reward of Moody raised ZeroDivisionError: none today; prompt 1, ")
    assert third.startswith("the reward of Moody returned None, which is not a Score; prompt 20, ")


class Moody(Echo):
    def __init__(self, error):
        self.error = error

    def score(self, prompt, text, completion):
        if self.error:
            raise self.error


def collect(generate, prompts=PROMPTS, *, seed=0, samples=2, **options):
    rollouter = Rollouter(score, seed=seed, watch=Stopwatch())
    return asyncio.run(
        rollouter.collect(prompts, SAMPLING, samples=samples, generate=generate, **options)
    )


def test_groups_and_samples_keep_the_order_of_the_prompts():
    groups = collect(Recorder())
    assert [[r.reward for r in group] for group in groups] == [[50, 51], [60, 61], [70, 71]]
    assert [[(r.prompt.prompt_id, r.sample) for r in group] for group in groups][1] == [
        (6, 0),
        (6, 1),
    ]
    assert [group[0].text for group in groups] == ["50", "60", "70"]
    assert groups[1][0].metrics == {"correct": 1.0, "tokens": 1.0}
    assert groups[0][0].metrics["correct"] == 0.0


def test_a_request_is_a_function_of_prompt_id_and_sample_alone():
    whole = Recorder()
    parts = Recorder()
    collect(whole)
    for prompt in random.Random(0).sample(PROMPTS, 3):
        collect(parts, [prompt])
    assert sorted(parts.requests, key=str) == sorted(whole.requests, key=str)
    first = whole.requests[0]
    assert first.seed == derive_seed(0, 5, 0)
    assert (first.prompt_tokens, first.sampling) == ([1, 5], SAMPLING)


def test_ids_are_unique_and_seeds_differ_by_stream_and_run():
    recorder = Recorder()
    collect(recorder)
    collect(recorder, stream="eval/sampled")
    assert len({request.request_id for request in recorder.requests}) == 12
    collect(recorder, seed=1)
    assert len({request.seed for request in recorder.requests}) == 18


def test_sampling_and_scoring_are_timed():
    watch = Stopwatch()
    rollouter = Rollouter(score, seed=0, watch=watch)
    asyncio.run(rollouter.collect(PROMPTS, SAMPLING, samples=2, generate=Recorder()))
    assert watch.lap().keys() > {"timing/generate", "timing/score"}


def test_a_lost_completion_is_an_error():
    async def forgetful(requests):
        return (await Recorder()(requests))[:-1]

    with pytest.raises(RunError, match="6 requests got 5 completions"):
        collect(forgetful)


def test_prompts_may_repeat_with_other_prompt_ids():
    again = [replace(PROMPTS[0], prompt_id=8), PROMPTS[0]]
    assert [[r.reward for r in group] for group in collect(Recorder(), again, samples=1)] == [
        [80],
        [50],
    ]


def test_a_lost_group_is_replaced_by_its_reason():
    before, lost, after = collect(
        Recorder(), [PROMPTS[0], replace(PROMPTS[0], prompt_id=9), PROMPTS[1]]
    )
    assert isinstance(lost, GroupLost)
    assert (lost.reason, str(lost)) == ("reward raised", "nine has no reward")
    assert [rollout.reward for rollout in [*before, *after]] == [50, 51, 60, 61]


def test_every_turn_of_every_sample_has_a_unique_seed():
    streams = ["train", "eval/greedy", "eval/sampled"]
    places = list(product(streams, range(3), range(12), range(12), range(3)))
    seeds = {
        derive_seed(run, prompt_id, sample, turn, stream=stream)
        for stream, run, prompt_id, sample, turn in places
    }
    assert len(seeds) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_never_change():
    """Runs are a function of their seeds: with new values no old run would be repeatable."""
    assert derive_seed(0, 0, 0) == 809641258927754436
    assert derive_seed(1, 23, 4, 5, stream="eval/greedy") == 5802365615274067443
