"""Episodes with an adversary: what is trained is what was sampled, token for token."""

import asyncio
import itertools
from dataclasses import replace

import numpy as np
import pytest

from rl.environments.protocol import TokenEnvironment, TokenReply
from rl.errors import GroupLost
from rl.observe.spans import Stopwatch
from rl.rollout.episodes import Environments
from rl.rollout.prompts import derive_seed
from rl.rollout.rollout_metrics import rollout_metrics
from rl.rollout.rollouter import Rollouter
from rl.types import Sampling
from rl.types.routed_experts import RoutedExperts
from tests.kit import moody_environment as moody
from tests.kit.adversary import Engine
from tests.kit.tokenizers import qwen3

SAMPLING = Sampling(max_tokens=150)
LONGEST = 900


def collect(
    model,
    prompt_ids,
    *,
    engine=None,
    samples=2,
    sampling=SAMPLING,
    task=moody.Moody,
    host=Environments,
    fewest=0,
    **fields,
):
    """Return the outcome of each prompt, and the rollouter with its warnings."""
    fields = {"max_episode_tokens": LONGEST, "step_s": 5.0} | fields
    task = task(task.Config(**fields), seed=0, model=model)
    environments = host(task)
    warnings = []
    rollouter = Rollouter(
        environments=environments,
        longest=min(model.max_seq_len, fields["max_episode_tokens"]),
        seed=3,
        watch=Stopwatch(),
        warn=warnings.append,
    )
    prompts = [task.prompt(prompt_id) for prompt_id in prompt_ids]
    work = rollouter.collect(
        prompts, sampling, samples=samples, generate=engine or Engine(), fewest=fewest
    )
    outcomes = asyncio.run(asyncio.wait_for(work, 300))
    assert len(environments) == 0
    rollouter.warnings = warnings
    return outcomes, rollouter


def test_an_episode_is_the_tokens_that_the_engine_was_fed_and_drew(model):
    engine = Engine()
    groups, _ = collect(model, range(60), engine=engine)
    answers = {}
    for request, completion in itertools.chain.from_iterable(engine.rounds):
        _, prompt_id, sample, turn = request.request_id.split("/")
        answers.setdefault((int(prompt_id), int(sample)), []).append((request, completion))
        assert request.seed == derive_seed(3, int(prompt_id), int(sample), int(turn))
    reasons = set()
    for group in groups:
        for rollout in group:
            (sequence,) = rollout.sequences
            tokens = sequence.tokens.tolist()
            own = answers.pop((rollout.prompt.prompt_id, rollout.sample))
            trained = np.zeros(len(tokens), dtype=bool)
            experts = np.full((len(tokens), 1, 1), 255, dtype=np.uint8)
            known = 0
            for request, completion in own:
                begin = len(request.prompt_tokens)
                place = slice(begin, begin + len(completion.tokens))
                assert tokens[:begin] == request.prompt_tokens
                assert tokens[place] == completion.tokens
                assert sequence.logprobs[place].tolist() == completion.logprobs
                assert sequence.versions[place].tolist() == completion.versions
                assert not trained[place].any()
                trained[place] = True
                assert request.experts_from == known
                experts[known : place.stop - 1] = completion.versions[0]
                known = place.stop - 1
            assert sequence.experts == RoutedExperts(experts)
            assert (sequence.sampled == trained).all()
            assert trained[-1], "nothing follows the last answer"
            assert (sequence.versions[~trained] == -1).all()
            assert (sequence.logprobs[~trained] == 0).all()
            assert len(tokens) <= LONGEST
            reasons.add(rollout.stop_reason)
            assert rollout.metrics["turns"] == len(own)
    assert not answers
    assert {"done", "length"} <= reasons


@pytest.mark.parametrize("mood", [4, moody.CLOSE_RAISES])
def test_rewards_of_the_steps_are_added_and_the_last_step_says_whether_it_is_solved(model, mood):
    plain = Engine(habits=["plain"])
    ((rollout, _),), _ = collect(model, [mood], engine=plain)
    assert rollout.stop_reason == "done"
    assert rollout.reward == 1.0
    assert rollout.turn_rewards == (0.25,) * moody.TURNS
    assert len(rollout.turns) == moody.TURNS
    assert sum(rollout.turns) == rollout.sampled_count
    expected = {"correct": 1.0, "mood": 1.0, "turns": 4.0, "malformed_calls": 0.0}
    assert rollout.metrics == expected
    assert rollout.text == qwen3().decode(rollout.sequences[0].tokens)
    assert len(plain.rounds) == moody.TURNS


def test_an_episode_whose_environment_gives_no_reward_abstains(model):
    ((rollout, _),), _ = collect(model, [moody.NO_REWARD], engine=Engine(habits=["plain"]))
    assert rollout.abstained and rollout.turn_rewards == (0.25, 0.0, 0.25, 0.25)


def test_malformed_calls_are_told_to_the_policy_and_not_to_the_environment(model):
    engine = Engine(habits=["invalid JSON"])
    ((rollout,),), _ = collect(model, [4], engine=engine, samples=1, max_turns=3)
    assert rollout.metrics["malformed_calls"] == 3.0
    assert rollout.reward == 0.0
    assert rollout.stop_reason == "turns"
    second = qwen3().decode(engine.rounds[1][0][0].prompt_tokens)
    assert "<tool_response>\nerror: " in second


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_turns": 2}, "turns"),
        ({"max_episode_tokens": 550}, "length"),
        ({"episode_s": 1e-9}, "timeout"),
        ({"max_episode_tokens": 10**6}, "context"),
    ],
)
def test_a_limit_ends_an_episode_after_an_answer(model, fields, reason):
    narrow = replace(model, max_seq_len=550) if reason == "context" else model
    engine = Engine(habits=["cut in text"])
    outcomes, _ = collect(narrow, [4], engine=engine, samples=1, **fields)
    ((rollout,),) = outcomes
    assert rollout.stop_reason == reason
    assert rollout.sequences[0].sampled[-1]


def test_answers_fit_into_the_room_that_is_left(model):
    engine = Engine(habits=["thinking, cut", "several calls"])
    wide = replace(SAMPLING, max_tokens=10**6)
    groups, _ = collect(model, range(10), engine=engine, sampling=wide)
    for request, _ in itertools.chain.from_iterable(engine.rounds):
        assert request.sampling.max_tokens == LONGEST - len(request.prompt_tokens) > 0
    assert all(len(each.sequences[0]) <= LONGEST for group in groups for each in group)


@pytest.mark.parametrize(("max_tokens", "share"), [(2, 1.0), (10**6, 0.0)])
def test_answers_that_the_maximum_length_cut_are_counted(model, max_tokens, share):
    engine = Engine(habits=["several calls"])
    sampling = replace(SAMPLING, max_tokens=max_tokens)
    groups, _ = collect(model, [4], engine=engine, sampling=sampling, max_turns=1)
    assert rollout_metrics(groups)["completion/cut_off"] == share
    assert [each.cut_turns for each in groups[0]] == [share] * 2


@pytest.mark.parametrize(
    ("mood", "reason", "words"),
    [
        (moody.RAISES, "environment raised", "no step today; prompt 100, sample"),
        (moody.RAISES_AT_RESET, "environment raised", "no episode today"),
        (moody.EXITS, "environment raised", "no step, no worker"),
        (moody.TIMES_OUT, "environment raised", "no answer of the user's server"),
        (moody.HANGS_ASYNC, "environment hung", "step took longer than task.step_s=2"),
        (moody.NO_STEP, "environment was invalid", "step returned None"),
        (moody.NAN, "environment was invalid", "reward=nan"),
        (moody.NO_MESSAGES, "environment was invalid", "there are no messages"),
        (moody.NO_OPENING, "environment was invalid", "reset returned 'hello'"),
        (moody.ASSISTANT, "environment was invalid", "message 0: an assistant's message"),
        (moody.LONG, "opening too long", "task.max_episode_tokens=900 with room for"),
    ],
)
def test_an_environment_that_fails_costs_its_group_alone(model, mood, reason, words):
    engine = Engine(habits=["plain"])
    limit = {"step_s": 2.0} if reason == "environment hung" else {}
    (lost, healthy), rollouter = collect(model, [mood, 4], engine=engine, **limit)
    assert isinstance(lost, GroupLost)
    assert lost.reason == reason
    assert words in str(lost)
    assert [rollout.stop_reason for rollout in healthy] == ["done"] * 2
    assert rollouter.lost.total() == 1
    assert len(rollouter.warnings) == 1


@pytest.mark.parametrize("fewest", [0, 2, 3])
def test_a_group_goes_on_with_as_many_episodes_as_the_config_asks_for(model, fewest):
    engine = Engine(habits=["plain"])
    (group, healthy), rollouter = collect(
        model, [moody.FIRST_RAISES, 4], engine=engine, samples=3, fewest=fewest
    )
    assert len(healthy) == 3
    if fewest == 2:
        assert [rollout.sample for rollout in group] == [1, 2]
        assert [rollout.reward for rollout in group] == [1.0, 1.0]
        assert rollouter.lost_episodes == {"environment raised (ZeroDivisionError)": 1}
        assert not rollouter.lost
    else:
        assert "no step today; prompt 120, sample 0" in str(group)
        assert rollouter.lost == {"environment raised (ZeroDivisionError)": 1}
        assert not rollouter.lost_episodes
    assert len(rollouter.warnings) == 1
    asked = [len(requests) for requests in engine.rounds]
    assert asked == [6, *[5 if fewest == 2 else 3] * (moody.TURNS - 1)]


class Counted(Environments):
    """Environments that note the largest number of open episodes."""

    largest = 0

    async def open(self, *args):
        Counted.largest = max(Counted.largest, len(self) + 1)
        return await super().open(*args)


@pytest.mark.parametrize(("most", "largest"), [(0, 15), (1, 1), (4, 4)])
async def test_no_more_episodes_are_open_than_the_limit_allows(model, most, largest):
    config = moody.Moody.Config(max_episode_tokens=LONGEST, step_s=100.0, max_open_episodes=most)
    task = config.build(seed=0, model=model)
    Counted.largest = 0
    environments = Counted(task)
    rollouter = Rollouter(
        environments=environments,
        longest=LONGEST,
        seed=3,
        watch=Stopwatch(),
        max_open=config.max_open_episodes,
    )
    engine = Engine(habits=["plain"])
    moods = ([4, moody.RAISES], [moody.FIRST_RAISES, 6, moody.RAISES_AT_RESET])
    runs = [
        rollouter.collect([*map(task.prompt, own)], SAMPLING, samples=3, generate=engine, fewest=2)
        for own in moods
    ]
    ((good, lost), (rest, other, never)) = await asyncio.gather(*runs)
    assert [len(good), len(rest), len(other)] == [3, 2, 3]
    assert all(rollout.reward == 1.0 for group in (good, rest, other) for rollout in group)
    assert {lost.reason, never.reason} == {"environment raised"}
    assert Counted.largest == largest
    assert len(environments) == 0


def test_all_episodes_of_a_group_may_be_lost(model):
    (group,), rollouter = collect(
        model, [4], engine=Engine(["plain"]), fewest=1, max_prompt_tokens=100
    )
    assert group.reason == "opening too long"
    assert "task.max_prompt_tokens=100 allows 100" in str(group)
    assert not rollouter.lost_episodes


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_an_answer_without_thinking_follows_an_empty_thought(model, enable_thinking):
    engine = Engine(habits=["plain"])
    collect(model, [4], engine=engine, samples=1, enable_thinking=enable_thinking)
    prompts = [qwen3().decode(request.prompt_tokens) for ((request, _),) in engine.rounds]
    ends = [prompt.endswith("<think>\n\n</think>\n\n") for prompt in prompts]
    assert ends == [not enable_thinking] * moody.TURNS


async def test_episodes_are_closed_when_sampling_is_cancelled(model):
    task = moody.Moody.Config(max_episode_tokens=LONGEST).build(seed=0, model=model)
    environments = Environments(task)
    rollouter = Rollouter(environments=environments, longest=LONGEST, seed=3, watch=Stopwatch())

    async def generate(requests):
        opened.set()
        await asyncio.Event().wait()

    opened = asyncio.Event()
    work = rollouter.collect([task.prompt(4)], SAMPLING, samples=3, generate=generate)
    run = asyncio.create_task(work)
    await opened.wait()
    assert len(environments) == 3
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert len(environments) == 0


WRONG = {
    100: ({"tokens": [10**6]}, "give tokens below"),
    101: ({"tokens": []}, "give tokens below"),
    102: ({"tokens": [-1]}, "give tokens below"),
    103: ({"tokens": "ab"}, "give tokens below"),
    104: ({"tokens": None}, "give tokens below"),
    105: ({"max_tokens": 0}, "give a max_tokens of at least 1"),
    106: ({"max_tokens": "7"}, "give a max_tokens of at least 1"),
    107: ({"top_logprobs": 21}, "give a top_logprobs from 0 to 20"),
    108: ({"stop_reason": "bored"}, "give a stop_reason of done, turns"),
    109: ({"stop": "ab"}, "give a stop of texts"),
    110: ({"stop": [""]}, "give a stop of texts"),
}
"""Fields of a first reply that cannot be used, by prompt_id, and what the error says."""


class Rewriter(TokenEnvironment):
    """Answers in tokens; each third prompt leaves out the turns before."""

    def __init__(self, wrong):
        self.opening = [1, 2, 3]
        self.tokens = [*self.opening]
        self.wrong = wrong
        self.turns = 0

    def reset(self):
        return replace(TokenReply(tokens=self.tokens, max_tokens=7), **self.wrong)

    def step(self, answer):
        self.turns += 1
        if self.turns == 6:
            return TokenReply(reward=1.0, done=True, stop_reason="turns", metrics={"own": 2.0})
        self.tokens = [*self.tokens, *answer.tokens, 5, 6]
        if self.turns % 3 == 0:
            self.tokens = [*self.opening, self.turns]
        return TokenReply(tokens=self.tokens)


class Rewritten(moody.Moody):
    """Task whose environment writes prompts in tokens; prompts 100 and above misbehave."""

    def environment(self, prompt, sample):
        return Rewriter(WRONG.get(prompt.prompt_id, ({},))[0])


def test_an_environment_that_writes_tokens_may_rewrite_the_history(model):
    engine = Engine()
    (group,), _ = collect(model, [4], engine=engine, task=Rewritten)
    assert [request.sampling.max_tokens for request, _ in engine.rounds[0]] == [7, 7]
    assert engine.rounds[1][0][0].sampling.max_tokens == SAMPLING.max_tokens
    for sample, rollout in enumerate(group):
        own = [by_sample[sample] for by_sample in engine.rounds]
        first, second = rollout.sequences
        for sequence, turns, opening in (
            (first, own[:3], [1, 2, 3]),
            (second, own[3:], [1, 2, 3, 3]),
        ):
            tokens = opening
            sampled = [False] * len(opening)
            for number, (request, completion) in enumerate(turns):
                assert request.prompt_tokens == tokens
                more = [5, 6] if number < 2 else []
                tokens = [*tokens, *completion.tokens, *more]
                sampled += [True] * len(completion.tokens) + [False] * len(more)
            assert sequence.tokens.tolist() == tokens
            assert sequence.sampled.tolist() == sampled
        assert rollout.stop_reason == "turns"
        assert rollout.metrics["turns"] == 6.0 and rollout.metrics["own"] == 2.0
        assert rollout.sampled_count == sum(len(completion.tokens) for _, completion in own)


def test_a_reply_in_tokens_that_cannot_be_used_costs_its_group(model):
    (*lost, healthy), _ = collect(model, [*WRONG, 4], engine=Engine(), task=Rewritten)
    for each, (_, said) in zip(lost, WRONG.values(), strict=True):
        assert each.reason == "environment was invalid"
        assert said in str(each)
    assert len(healthy) == 2
