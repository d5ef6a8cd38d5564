"""Agents as environments: their conversations are trained token for token."""

import asyncio
import itertools

import numpy as np
import pytest

from rl.environments.agent import MAX_OUTPUT
from rl.errors import GroupLost
from rl.model.shape import ModelConfig
from rl.observe.spans import Stopwatch
from rl.rollout import episodes
from rl.rollout.episodes import Environments
from rl.rollout.rollouter import Rollouter
from rl.types import Sampling
from tests.kit import agent_tasks as agents
from tests.kit.adversary import Engine
from tests.kit.tables import long
from tests.rollout import test_episodes

PLAIN = ["plain", "odd tokens", "several calls"]
SAMPLING = Sampling(max_tokens=150, temperature=0.7)


@pytest.fixture
def model(tiny_model) -> ModelConfig:
    return ModelConfig(hf_path=str(tiny_model), max_seq_len=3000)


class SlowEngine(Engine):
    """Engine that sets the clock forward by ``seconds`` in each round."""

    def __init__(self, habits, seconds):
        super().__init__(habits=habits)
        self.seconds = seconds

    async def __call__(self, requests):
        agents.Clock.ahead += self.seconds
        return await super().__call__(requests)


def collect(
    model, prompt_ids, *, task=agents.Agents, samples=2, habits=PLAIN, engine_s=0.0, **fields
):
    """Return the outcome of each prompt, and the engine."""
    fields = {"max_episode_tokens": 2500, "step_s": 120.0, "max_turns": 8} | fields
    engine = SlowEngine(habits, engine_s)
    outcomes, _ = test_episodes.collect(
        model, prompt_ids, task=task, engine=engine, samples=samples, sampling=SAMPLING, **fields
    )
    return outcomes, engine


def check(group, engine):
    """Check that each answer is sampled in one sequence, after the tokens it was sampled after."""
    answers = {}
    for request, completion in itertools.chain.from_iterable(engine.rounds):
        _, prompt_id, sample, turn = request.request_id.split("/")
        assert request.sampling.temperature == SAMPLING.temperature
        answers[int(prompt_id), int(sample), int(turn)] = request, completion
    for rollout in group:
        own = [
            pair
            for (prompt_id, sample, _), pair in answers.items()
            if (prompt_id, sample) == (rollout.prompt.prompt_id, rollout.sample)
        ]
        assert rollout.metrics["turns"] == len(own)
        trained = [np.zeros(len(each), dtype=bool) for each in rollout.sequences]
        for request, completion in own:
            begin = len(request.prompt_tokens)
            place = slice(begin, begin + len(completion.tokens))
            whole = request.prompt_tokens + completion.tokens
            (found,) = (
                number
                for number, each in enumerate(rollout.sequences)
                if each.tokens[: place.stop].tolist() == whole and each.sampled[place].all()
            )
            sequence = rollout.sequences[found]
            assert sequence.logprobs[place].tolist() == completion.logprobs
            assert sequence.versions[place].tolist() == completion.versions
            assert not trained[found][place].any()
            trained[found][place] = True
        for sequence, mask in zip(rollout.sequences, trained, strict=True):
            assert (sequence.sampled == mask).all()
        assert rollout.sampled_count == sum(len(completion.tokens) for _, completion in own)


def test_the_form_of_an_answer_is_asked_of_the_generator(model):
    (group,), engine = collect(model, [0], task=agents.Formed)
    check(group, engine)
    asked = [request.sampling for request, _ in itertools.chain.from_iterable(engine.rounds)]
    forms = [(each.json_schema, each.min_tokens, each.is_cut) for each in asked]
    wanted = [('{"type": "object"}', 0, True), (None, 90, True), (None, 0, False)]
    assert sorted(forms, key=str) == sorted(wanted * len(group), key=str)


@pytest.mark.parametrize(("prompt_id", "sequences"), [(3, 1), (4, 2), (5, agents.TURNS)])
def test_a_rewritten_history_begins_a_sequence_and_each_answer_is_trained_once(
    model, prompt_id, sequences
):
    (group,), engine = collect(model, [prompt_id])
    check(group, engine)
    for rollout in group:
        assert len(rollout.sequences) == rollout.metrics["sequences"] == sequences
        assert rollout.metrics["rewritten"] == sequences - 1
        assert rollout.metrics["turns"] == agents.TURNS
        assert (rollout.reward, rollout.stop_reason, rollout.metrics["own"]) == (1.0, "done", 2)
    sizes = {request.sampling.max_tokens for turns in engine.rounds for request, _ in turns}
    assert sizes == {100}, "the agent's max_tokens is smaller"


def test_episodes_of_agents_are_the_same_again(model):
    first, second = (collect(model, range(3))[0] for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert [each.sequences for each in one] == [each.sequences for each in other]


@pytest.mark.parametrize("task", [agents.Blocking, agents.Program])
def test_blocking_clients_and_programs_are_agents_too(model, task, behind_proxy):
    (group,), engine = collect(model, [0], task=task, samples=2)
    check(group, engine)
    for rollout in group:
        assert rollout.stop_reason == "done"
        assert rollout.metrics["turns"] == (3 if task is agents.Blocking else 2)
        assert rollout.reward == (1.0 if task is agents.Blocking else 5.0)


def test_an_agent_gets_the_log_probs_of_its_answers(model):
    """Those of the most likely tokens change nothing that is trained. Its stop texts are passed on;
    log-probs of prompts are refused.
    """
    trained = []
    for top in (0, 3):
        (group,), engine = collect(model, [1], task=agents.Sure, top=top)
        samplings = [request.sampling for turns in engine.rounds for request, _ in turns]
        assert {(each.top_logprobs, each.stop) for each in samplings} == {(top, ("never",))}
        for rollout in group:
            (sequence,) = rollout.sequences
            assert rollout.reward == pytest.approx(sequence.logprobs[sequence.sampled].sum())
            assert rollout.reward < 0
            assert rollout.metrics["likely"] == top * rollout.sampled_count
            assert rollout.metrics["refused"] == 1
        trained.append([rollout.sequences for rollout in group])
    assert trained[0] == trained[1]


@pytest.mark.parametrize(
    ("mood", "reason", "words"),
    [
        (agents.RAISES, "environment raised", "no reward today"),
        (agents.SILENT, "environment raised", "ended without a request"),
        (agents.EXITS, "environment raised", "no agent, no worker"),
        (agents.NO_REPLY, "environment raised", "agent returned None, which is not a Reply"),
        (agents.FAILS, "environment raised", "exit code 1: no such tool"),
    ],
)
def test_an_agent_that_fails_costs_its_group_alone(model, mood, reason, words):
    (lost, healthy), engine = collect(model, [mood, 3])
    assert isinstance(lost, GroupLost)
    assert lost.reason == reason
    assert words in str(lost)
    check(healthy, engine)
    assert [rollout.reward for rollout in healthy] == [1.0, 1.0]


def test_an_agent_that_hangs_is_lost_in_time(model):
    (lost,), _ = collect(model, [agents.HANGS], step_s=3.0)
    assert isinstance(lost, GroupLost)
    assert lost.reason == "environment hung"
    assert "task.step_s=3" in str(lost)


@pytest.mark.parametrize(("mood", "reward"), [(agents.ENDLESS, 0.5), (agents.ENDLESS_RAISES, 0.0)])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"max_turns": 3}, "turns"), ({"max_episode_tokens": 1100, "max_turns": 100}, "length")],
)
def test_an_agent_at_a_limit_gets_an_error_and_may_still_return_its_reward(
    model, mood, reward, fields, reason
):
    (group,), engine = collect(model, [mood], **fields)
    check(group, engine)
    assert [(each.reward, each.stop_reason) for each in group] == [(reward, reason)] * 2


@pytest.mark.parametrize(
    ("then", "outcome"),
    [
        ("raises", (0.0, "length")),
        ("wraps", (0.0, "length")),
        long("program", (0.0, "length")),
        ("goes on", (0.25, "done")),
        ("tool", "refused the connection"),
        ("tool later", "refused the connection"),
        ("tool while handling", "refused the connection"),
        ("group", "two"),
        ("program, tool", "refused the connection"),
    ],
)
def test_an_agent_that_loses_a_tool_after_an_overflow_is_lost(model, then, outcome):
    fields = {"max_episode_tokens": 1100, "max_turns": 100}
    (group,), engine = collect(model, [0], task=agents.Overflows, then=then, **fields)
    if isinstance(outcome, str):
        assert isinstance(group, GroupLost)
        assert group.reason == "environment raised"
        assert outcome in str(group)
    else:
        check(group, engine)
        assert [(each.reward, each.stop_reason) for each in group] == [outcome] * 2


@pytest.mark.parametrize("exit_code", [0, 3])
def test_what_a_command_prints_beyond_a_limit_is_dropped(model, exit_code, tmp_path):
    fields = {"folder": str(tmp_path), "exit_code": exit_code, "step_s": 600.0}
    (group,), _ = collect(model, [0], task=agents.Prints, samples=1, **fields)
    if exit_code:
        assert "bash ended with exit code 3: " in str(group)
        assert "the end; prompt 0" in str(group)
        assert len(str(group)) < 20_000
    else:
        (rollout,) = group
        assert (rollout.metrics["kept"], rollout.metrics["pipes"]) == (MAX_OUTPUT, 2)


@pytest.mark.parametrize(("engine_s", "agent_s"), [(900.0, 0.0), (0.0, 900.0)])
def test_time_of_sampling_does_not_end_an_episode_and_an_agent_without_time_is_lost(
    model, engine_s, agent_s, monkeypatch
):
    monkeypatch.setattr(episodes, "time", agents.Clock)
    (group,), _ = collect(
        model, [0], task=agents.Slow, agent_s=agent_s, episode_s=600.0, engine_s=engine_s
    )
    if agent_s:
        assert isinstance(group, GroupLost)
        assert group.reason == "environment timed out"
        assert "task.episode_s=600" in str(group)
    else:
        assert [(each.reward, each.stop_reason) for each in group] == [(0.75, "done")] * 2


def test_agents_end_when_sampling_is_cancelled(model):
    async def cancelled():
        config = agents.Agents.Config(max_episode_tokens=2500)
        task = agents.Agents(config, seed=0, model=model)
        environments = Environments(task)
        rollouter = Rollouter(environments=environments, longest=2500, seed=3, watch=Stopwatch())
        opened = asyncio.Event()

        async def generate(requests):
            opened.set()
            await asyncio.Event().wait()

        before = asyncio.all_tasks()
        work = rollouter.collect([task.prompt(3)], SAMPLING, samples=3, generate=generate)
        run = asyncio.create_task(work)
        await opened.wait()
        run.cancel()
        await asyncio.wait([run])
        assert len(environments) == 0
        left = asyncio.all_tasks() - before
        assert not [each for each in left if "_act" in repr(each)]

    asyncio.run(cancelled())
