"""Requests depend on prompt_ids alone; rollouts keep the order of their prompts."""

import asyncio
import random
from dataclasses import replace
from itertools import product

import pytest

from rl.environments.task import Score
from rl.errors import GroupLost, RunError
from rl.observe.spans import Stopwatch
from rl.rollout.prompts import derive_seed
from rl.rollout.rollouter import Rollouter
from rl.rollout.scoring import rollouts_of, score_group
from rl.types import Completion, Prompt, Sampling

SAMPLING = Sampling(max_tokens=4, temperature=0.7, stop_token_ids=(2,))
PROMPTS = [
    Prompt(prompt_id=prompt_id, tokens=[1, prompt_id], text="", answer="")
    for prompt_id in (5, 6, 7)
]


class Echo:
    """Task with the first token as its reward, unless it has an error to raise."""

    def __init__(self, error=None):
        self.error = error

    def decode(self, tokens):
        return " ".join(map(str, tokens))

    def score(self, prompt, text, completion):
        if self.error is not None:
            raise self.error
        correct = prompt.prompt_id == 6
        return Score(reward=float(text.split()[0]), correct=correct, metrics={"tokens": 1.0})


async def score(prompt, completions):
    if prompt.prompt_id == 9:
        raise GroupLost("reward raised", "nine has no reward")
    await asyncio.sleep(0.001 * (8 - prompt.prompt_id))  # the first prompt's group is scored last
    return rollouts_of(prompt, completions, score_group(Echo(), prompt, completions))


class Recorder:
    """Generator of completions of one token: ten times the prompt_id plus the sample."""

    def __init__(self):
        self.requests = []

    async def __call__(self, requests):
        self.requests += requests
        await asyncio.sleep(0)
        places = [tuple(map(int, request.request_id.split("/")[-2:])) for request in requests]
        return [Completion.written([10 * prompt_id + sample]) for prompt_id, sample in places]


def collect(generate, prompts=PROMPTS, *, seed=0, samples=2, score=score, warn=print, **options):
    """Return the groups and the rollouter."""
    rollouter = Rollouter(score, seed=seed, watch=Stopwatch(), warn=warn)
    work = rollouter.collect(prompts, SAMPLING, samples=samples, generate=generate, **options)
    return asyncio.run(work), rollouter


def test_groups_and_samples_keep_the_order_of_the_prompts_and_are_timed():
    lost = replace(PROMPTS[0], prompt_id=9)
    again = replace(PROMPTS[0], prompt_id=8)
    groups, rollouter = collect(Recorder(), [*PROMPTS, lost, again])
    error = groups.pop(3)
    assert (error.reason, str(error)) == ("reward raised", "nine has no reward")
    assert [[r.reward for r in group] for group in groups] == [
        [10 * prompt_id, 10 * prompt_id + 1] for prompt_id in (5, 6, 7, 8)
    ]
    assert [(r.prompt.prompt_id, r.sample) for r in groups[1]] == [(6, 0), (6, 1)]
    assert [group[0].text for group in groups] == ["50", "60", "70", "80"]
    assert groups[1][0].metrics == {"correct": 1.0, "tokens": 1.0}
    assert groups[0][0].metrics["correct"] == 0.0
    assert rollouter.watch.lap().keys() > {"timing/generate", "timing/score"}


def test_the_first_lost_group_of_each_kind_is_reported_and_all_are_counted():
    async def fail(prompt, completions):
        error = ZeroDivisionError("none today") if prompt.prompt_id % 2 else KeyError("seven")
        if prompt.prompt_id >= 20:
            return score_group(Mute(), prompt, completions)
        return score_group(Echo(error), prompt, completions)

    class Mute(Echo):
        def score(self, prompt, text, completion):
            return None

    shown = []
    prompts = [replace(PROMPTS[0], prompt_id=prompt_id) for prompt_id in range(24)]
    groups, rollouter = collect(Recorder(), prompts, samples=1, score=fail, warn=shown.append)
    assert all(isinstance(group, GroupLost) for group in groups)
    assert rollouter.lost == {
        "reward raised (KeyError)": 10,
        "reward raised (ZeroDivisionError)": 10,
        "reward was invalid": 4,
    }
    first, second, third = shown
    cause = "the reward of Echo raised KeyError: 'seven'; prompt 0, sample 0, completion '0'"
    assert first.startswith(f"{cause}\nTraceback")
    assert "test_rollouter.py" in first
    assert first.endswith("the group is lost; more groups of this kind are only counted")
    assert second.startswith("the reward of Echo raised ZeroDivisionError: none today; prompt 1, ")
    assert third.startswith("the reward of Mute returned None, which is not a Score; prompt 20, ")


def test_a_request_is_a_function_of_prompt_id_and_sample_alone():
    whole, parts = Recorder(), Recorder()
    collect(whole)
    for prompt in random.Random(0).sample(PROMPTS, 3):
        collect(parts, [prompt])
    assert sorted(parts.requests, key=str) == sorted(whole.requests, key=str)
    first = whole.requests[0]
    assert first.seed == derive_seed(0, 5, 0)
    assert (first.prompt_tokens, first.sampling) == ([1, 5], SAMPLING)
    collect(whole, stream="eval/sampled")
    assert len({request.request_id for request in whole.requests}) == 12
    collect(whole, seed=1)
    assert len({request.seed for request in whole.requests}) == 18


def test_a_lost_completion_is_an_error():
    async def forgetful(requests):
        return (await Recorder()(requests))[:-1]

    with pytest.raises(RunError, match="6 requests got 5 completions"):
        collect(forgetful)


def test_every_turn_of_every_sample_has_a_unique_seed_that_never_changes():
    """Runs are a function of their seeds: with new values no old run would be repeatable."""
    streams = ["train", "eval/greedy", "eval/sampled"]
    places = list(product(streams, range(3), range(12), range(12), range(3)))
    seeds = {
        derive_seed(run, prompt_id, sample, turn, stream=stream)
        for stream, run, prompt_id, sample, turn in places
    }
    assert len(seeds) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(0, 0, 0) == 809641258927754436
    assert derive_seed(1, 23, 4, 5, stream="eval/greedy") == 5802365615274067443
