"""A mixture shows each task as often as it should, with its own prompts and scores."""

from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.cli.arguments import parse_config
from rl.config import RLConfig
from rl.config.frozen import frozen
from rl.data.order import epoch_index
from rl.environments.task import Score, Task
from rl.errors import ConfigError, RunError
from rl.model.shape import ModelConfig
from rl.rollout.scoring import is_async, score_group
from rl.tasks.copy_digits import TOKEN, CopyDigits, word_tokenizer
from rl.tasks.mixture import Mixture, Stage
from rl.types import Completion, Prompt


class Numbers(Task):
    """Task of the numbers from ``first`` on, the ``held_out`` first of them for evaluation."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        first: int = 0
        held_out: int = 1000
        stop: int = TOKEN["<eos>"]
        words: tuple[str, ...] = ()
        max_prompt_tokens: int = 16

    def __init__(self, config, *, seed, model):
        super().__init__(config, seed=seed, model=model)
        tokenizer = word_tokenizer()
        tokenizer.add_tokens(list(config.words))
        self.set_tokenizer(tokenizer, (config.stop,))

    def prompt(self, prompt_id):
        answer = str(self.config.first + prompt_id)
        return Prompt(prompt_id=prompt_id, tokens=[0], text="", answer=answer)

    def eval_prompts(self, count):
        places = range(min(count, self.config.held_out))
        return [replace(self.prompt(place), text="held out") for place in places]

    def score(self, prompt, text, completion):
        reward = self.config.first + float(text)
        return Score(reward=reward, correct=text == prompt.answer)


def build(seed=0, **config) -> Mixture:
    return Mixture.Config(**config).build(seed=seed, model=ModelConfig(vocab_size=32))


def numbers(*names, **config) -> dict[str, Task.Config]:
    return {name: Numbers.Config(first=1000 * place, **config) for place, name in enumerate(names)}


def stage(first_prompt_id, **weights) -> Stage:
    return Stage(first_prompt_id=first_prompt_id, weights=weights)


weights = st.dictionaries(st.sampled_from("abc"), st.floats(0, 10), min_size=1).filter(
    lambda w: any(w.values())
)


@settings(max_examples=60)
@given(
    st.lists(weights, min_size=1, max_size=4),
    st.lists(st.integers(1, 60), min_size=3, max_size=3),
    st.lists(st.integers(0, 249), max_size=5),
)
def test_each_task_shows_its_prompts_in_order_across_stages(stages, lengths, jumps):
    starts = [sum(lengths[:place]) for place in range(1, len(stages))]
    later = [stage(start, **w) for start, w in zip(starts, stages[1:], strict=True)]
    config = {"tasks": numbers("a", "b", "c"), "weights": stages[0], "stages": later}
    task = build(**config)
    shown = Counter()
    stream = [task.prompt(prompt_id) for prompt_id in range(250)]
    for prompt_id, prompt in enumerate(stream):
        assert prompt.prompt_id == prompt_id
        assert prompt.answer == str(1000 * "abc".index(prompt.task) + shown[prompt.task])
        shown[prompt.task] += 1
    for start, end, w in zip([0, *starts], [*starts, 250], stages, strict=True):
        counts = Counter(prompt.task for prompt in stream[start:end])
        shares = {name: weight / sum(w.values()) for name, weight in w.items()}
        shown_at_all = sum(share > 0 for share in shares.values())
        for name, share in shares.items():
            bound = 0.5 + share * (shown_at_all - 2) / 2 if share else 0.0
            assert abs(counts[name] - (end - start) * share) <= bound + 1e-9
    fresh = build(**config)  # as after a resume: without state
    assert [fresh.prompt(prompt_id) for prompt_id in jumps] == [stream[each] for each in jumps]


def test_a_far_prompt_is_computed_without_the_earlier_ones():
    stages = [stage(10**7, b=1.0)]
    task = build(tasks=numbers("a", "b"), weights={"a": 0.75, "b": 0.25}, stages=stages)
    assert task.prompt(10**7).answer == str(1000 + 2_500_000)
    assert task.prompt(10**9).answer == str(1000 + 2_500_000 + 990_000_000)


def test_tasks_without_weights_are_shown_equally():
    task = build(tasks=numbers("a", "b", "c"))
    shown = Counter(task.prompt(prompt_id).task for prompt_id in range(30))
    assert shown == {"a": 10, "b": 10, "c": 10}


def test_prompts_of_a_task_are_those_of_its_own_seed():
    tasks = {"one": CopyDigits.Config(digits=1), "three": CopyDigits.Config()}
    task = build(tasks=tasks, weights={"one": 1}, stages=[stage(30, three=1)], max_prompt_tokens=16)
    digits = [len(task.prompt(prompt_id).answer.split()) for prompt_id in range(60)]
    assert digits == [1] * 30 + [3] * 30
    assert task.prompt(40).tokens == task.tokenizer(task.prompt(40).text)["input_ids"]
    other = build(seed=1, tasks=tasks, weights={"three": 1}, max_prompt_tokens=16)
    assert task.prompt(40) != other.prompt(40)


def test_every_task_scores_its_own_also_in_a_mixture_of_mixtures():
    outer = Mixture.Config(tasks=numbers("a", "b"), weights={"b": 1.0})
    task = build(tasks={"outer": outer, "c": Numbers.Config(first=5000)})
    silent = Completion.written([])
    scores = {
        prompt.task: task.score(prompt, "1000", silent) for prompt in map(task.prompt, range(2))
    }
    assert {name: (score.reward, score.correct) for name, score in scores.items()} == {
        "outer/b": (2000.0, True),
        "c": (6000.0, False),
    }


class LaterDigits(CopyDigits):
    """Task whose reward is awaited."""

    @dataclass(kw_only=True, slots=True)
    class Config(CopyDigits.Config):
        pass

    async def score(self, prompt, text, completion):
        return super().score(prompt, text, completion)


def test_tasks_whose_rewards_are_awaited_mix_with_others():
    inner = Mixture.Config(tasks={"later": LaterDigits.Config(), "now": CopyDigits.Config()})
    task = build(tasks={"inner": inner, "now": CopyDigits.Config()})
    assert is_async(task)
    assert not is_async(build(tasks={"now": CopyDigits.Config()}))
    for prompt in map(task.prompt, range(6)):
        answer = [TOKEN[word] for word in [*prompt.answer.split(), "<eos>"]]
        ((_, score),) = score_group(task, prompt, [Completion.written(answer)])
        assert score.correct


def test_held_out_prompts_are_of_all_tasks_in_proportion_to_their_shares_of_the_stages():
    tasks = numbers("a", "b", "c", "never")
    config = {"tasks": tasks, "weights": {"a": 1.0}, "stages": [stage(9, b=3.0, c=1.0)]}
    prompts = build(**config).eval_prompts(80)
    assert Counter(prompt.task for prompt in prompts) == {"a": 40, "b": 30, "c": 10}
    assert [prompt.prompt_id for prompt in prompts] == list(range(80))
    assert {prompt.text for prompt in prompts} == {"held out"}
    assert build(seed=3, **config).eval_prompts(20) == prompts[:20]
    weights = {"never": 3.0, "a": 1.0}
    prompts = build(**config, held_out_weights=weights).eval_prompts(80)
    assert Counter(prompt.task for prompt in prompts) == {"never": 60, "a": 20}
    few = numbers("a", held_out=3) | {"b": Numbers.Config(held_out=10)}
    task = build(tasks=few, weights={"a": 9, "b": 1})
    assert Counter(prompt.task for prompt in task.eval_prompts(8)) == {"a": 3, "b": 5}
    assert len(task.eval_prompts(100)) == 13


class Listed(Numbers):
    """Shows the numbers from ``first`` to ``last``, by epochs; every tenth is held out."""

    @dataclass(kw_only=True, slots=True)
    class Config(Numbers.Config):
        last: int = 99

    def __init__(self, config, *, seed, model):
        super().__init__(config, seed=seed, model=model)
        numbers = range(config.first, config.last + 1)
        self.held_out = numbers[::10]
        self.train = [number for number in numbers if number not in numbers[::10]]

    def prompt(self, prompt_id):
        number = self.train[epoch_index(self.seed, prompt_id, len(self.train))]
        return self._of(prompt_id, number)

    def eval_prompts(self, count):
        return [self._of(place, number) for place, number in enumerate(self.held_out[:count])]

    def _of(self, prompt_id, number):
        return Prompt(prompt_id=prompt_id, tokens=[number], text=str(number), answer="")


@pytest.mark.parametrize("is_nested", [False, True])
def test_no_task_trains_on_held_out_prompts_of_another(is_nested):
    first, second = Listed.Config(), Listed.Config(first=5, last=104)
    if is_nested:
        second = Mixture.Config(tasks={"b": second}, max_prompt_tokens=16)
    task = build(tasks={"a": first, "b": second})
    stream = [task.prompt(prompt_id) for prompt_id in range(1000)]
    held_out = {prompt.text for prompt in task.eval_prompts(1000)}
    assert len(held_out) == 20
    assert not held_out & {prompt.text for prompt in stream}
    assert Counter(prompt.task[0] for prompt in stream) == {"a": 500, "b": 500}
    assert [prompt.prompt_id for prompt in stream] == list(range(1000))
    assert [task.prompt(prompt_id) for prompt_id in reversed(range(1000))] == stream[::-1]
    assert len({prompt.text for prompt in stream}) == 85


def test_a_task_that_another_holds_out_entirely_is_refused_by_name():
    task = build(tasks={"a": Listed.Config(), "b": Listed.Config(last=9)})
    task.tasks["b"].train = [0]
    said = "task.tasks: a holds out for evaluation what b would train on: 100 prompts"
    with pytest.raises(RunError, match=said):
        task.prompt(1)


DIGITS = CopyDigits.Config()
REFUSED = [
    ({"tasks": {}}, "task.tasks is empty; name at least one"),
    ({"tasks": numbers("a b")}, "the name 'a b'; it must be letters, digits and underscores"),
    (
        {"tasks": numbers("a"), "max_prompt_tokens": 8},
        "task.tasks.a.max_prompt_tokens is 16; it must be at most task.max_prompt_tokens=8",
    ),
    ({"tasks": {"a": CopyDigits.Config(digits=0)}}, "task.tasks.a: task.digits: 0 leaves nothing"),
    ({"weights": {"c": 1.0}}, "task.weights names 'c'; the tasks are a, b"),
    *[
        ({"weights": {"a": value}}, f"task.weights.a is {value}; it must be 0 or above, and finite")
        for value in (-1.0, float("nan"), float("inf"))
    ],
    ({"weights": {"a": 0.0}}, r"task.weights is \{'a': 0.0}; at least one must be above 0"),
    ({"stages": [stage(5)]}, r"task.stages.0.weights is \{}; at least one"),
    ({"stages": [stage(0, a=1)]}, "task.stages.0.first_prompt_id is 0; it must be above 0"),
    ({"stages": [stage(7, a=1), stage(7, b=1)]}, "task.stages.1.first_.* is 7; it must be above 7"),
    ({"stages": [stage(7, z=1)]}, "task.stages.0.weights names 'z'; the tasks are a, b"),
    ({"held_out_weights": {"z": 1.0}}, "task.held_out_weights names 'z'; the tasks are a, b"),
    (
        {"tasks": {"a": DIGITS, "b": Numbers.Config(words=("more",))}},
        "task.tasks: a and b have different tokenizers",
    ),
    ({"tasks": {"a": DIGITS, "b": Numbers.Config(stop=3)}}, "a and b have different tokenizers"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_a_mixture_that_cannot_work_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        build(**{"tasks": numbers("a", "b"), **config})


def mixed() -> RLConfig:
    """A config with a mixture."""
    tasks = {"one": CopyDigits.Config(digits=1), "two": CopyDigits.Config(digits=2)}
    weights = {"one": 1.0, "two": 2.0}
    return RLConfig(task=Mixture.Config(tasks=tasks, weights=weights, stages=[stage(5, two=1.0)]))


def test_fields_of_inner_tasks_weights_and_stages_are_given_on_the_command_line():
    def parsed(**fields: str) -> RLConfig:
        given = [word for name, value in fields.items() for word in (f"--task.{name}", value)]
        return parse_config(["--config", f"{__name__}.mixed", *given], program="train")[1]

    first = {"tasks.one.digits": "4", "weights.two": "0.5"}
    config = parsed(**first, **{"stages.0.first_prompt_id": "7", "stages.0.weights.two": "3"})
    data = frozen(config)["task"]
    assert data["tasks"]["one"] == {
        "type": "rl.tasks.copy_digits.CopyDigits.Config",
        "max_prompt_tokens": 16,
        "digits": 4,
    }
    assert (data["tasks"]["two"]["digits"], data["weights"]) == (2, {"one": 1.0, "two": 0.5})
    assert data["stages"] == [{"first_prompt_id": 7, "weights": {"two": 3.0}}]
    said = r"--task.tasks.one.digit: .*did you mean --task.tasks.one.digits"
    with pytest.raises(ConfigError, match=said):
        parsed(**{"tasks.one.digit": "4"})
