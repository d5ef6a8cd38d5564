"""Task of the procedural datasets of the package reasoning-gym."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, ClassVar

from rl.data.jsonl import tell_progress
from rl.dialects.answers import without_thoughts
from rl.environments.task import Score
from rl.errors import ConfigError, nearest, require, shown
from rl.tasks.chat import ChatTask, Problem
from rl.types import Completion, Prompt
from rl.types.rules import at_least

SOLVED = 0.99  # a score of 1, up to rounding
COMPARED = 32  # items that another process makes again
PROCESS_S = 300.0
MAKE_AGAIN = """
import json, sys
import reasoning_gym

name, options, numbers = json.loads(sys.argv[1])
data = reasoning_gym.create_dataset(name, **options)
items = [data[number] for number in numbers]
print("\\n" + json.dumps([[item["question"], str(item["answer"])] for item in items]))
"""


class ReasoningGym(ChatTask):
    """Task of the items of one dataset of reasoning-gym.

    - An answer is the text in the last ``<answer>…</answer>`` of a completion.
    - The reward is what the dataset's ``score_answer`` returns for it, 0 without an answer. A
      scorer that raises gives 0 too.
    - A completion is correct if its reward is above 0.99.
    - A dataset whose items depend on the process is refused: a resumed run would have others.

    Tokenizer and chat template are those of ``model.hf_path``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChatTask.Config):
        dataset: str = ""
        """Name of the dataset in reasoning-gym, such as ``chain_sum``."""

        options: str = "{}"
        """Options of the dataset, as a JSON object, such as ``{"min_terms": 3}``."""

        items: Annotated[int, at_least(2, 10**6)] = 2000
        """Number of items, those held out included. All are made before the run starts."""

        instruction: str = (
            "Think step by step, then give only the final answer between <answer> and </answer>."
        )
        """Text that follows each question in the user's message."""

    config: Config
    field = "dataset"
    unit = "item"
    can_only_score: ClassVar[bool] = True

    def __init__(self, config: Config, **options: Any):
        self._dataset = make_dataset(config)
        self._item = lru_cache(maxsize=1024)(self._dataset.__getitem__)
        super().__init__(config, **options)

    def read_problems(self) -> list[Problem]:
        require_same_items(self._dataset, self.config)
        problems = []
        firsts = dict[str, int]()
        for number in range(self.config.items):
            if number % 500 == 0:
                tell_progress(f"made {number:,} of {self.config.items:,} items of {self.source}")
            item = self._item(number)
            first = firsts.setdefault(item["question"], number)  # equal prompts, equal answers
            answer = json.dumps({"item": first, "answer": str(self._item(first)["answer"])})
            problems.append(Problem(number=number, question=item["question"], answer=answer))
        return problems

    def score(self, prompt: Prompt, text: str, completion: Completion) -> Score:
        """Return the score. Metric ``answered``: the text has an answer; ``scorer_failed``: the
        scorer raised.
        """
        pieces = without_thoughts(text, prompt).split("</answer>")[:-1]  # in linear time
        answers = [piece.split("<answer>", 1)[1] for piece in pieces if "<answer>" in piece]
        reward = 0.0
        failed = False
        if answers:
            try:
                item = self._item(json.loads(prompt.answer)["item"])
                reward = float(self._dataset.score_answer(answers[-1].strip(), item))
            except Exception:  # scorers parse the answer, and some of them raise on nonsense
                failed = True
        metrics = {"answered": float(bool(answers)), "scorer_failed": float(failed)}
        return Score(reward=reward, correct=reward > SOLVED, metrics=metrics)


def make_dataset(config: ReasoningGym.Config) -> Any:
    """Return the dataset of the config. Raises ConfigError if reasoning-gym refuses it."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            f"task: reasoning-gym cannot be imported ({error}); pip install 'tiller-rl[reasoning]'"
        ) from None
    name = config.dataset
    require(
        name in DATASETS,
        f"task.dataset: reasoning-gym has no dataset {name!r}; {nearest(name, DATASETS)}"
        "reasoning_gym.factory.DATASETS has all names",
    )
    try:
        return reasoning_gym.create_dataset(name, **dataset_options(config))
    except Exception as error:  # each dataset checks its options in its own way
        raise ConfigError(
            f"task.options: {config.options} are refused by the dataset {name!r}: "
            f"{type(error).__name__}: {error}"
        ) from None


def dataset_options(config: ReasoningGym.Config) -> dict[str, Any]:
    """Return the options of the config with size and seed, both the same for every run."""
    try:
        options = json.loads(config.options)
    except ValueError as error:
        raise ConfigError(f"task.options: {shown(config.options)} is not JSON: {error}") from None
    require(
        isinstance(options, dict) and not {"size", "seed"} & {*options},
        f"task.options: {config.options} must be a JSON object without 'size' and 'seed'; "
        "task.items is the size",
    )
    return {**options, "size": config.items, "seed": 0}


def require_same_items(dataset: Any, config: ReasoningGym.Config) -> None:
    """Raise ConfigError if another process makes other items, with another seed of Python's hashes
    and in another order.
    """
    numbers = [*reversed(range(min(COMPARED, config.items)))]
    request = json.dumps([config.dataset, dataset_options(config), numbers])
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    tell_progress(f"comparing items of {config.dataset} with those of another process")
    answer = subprocess.run(
        [sys.executable, "-c", MAKE_AGAIN, request],
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
    )
    require(
        answer.returncode == 0,
        f"task.dataset: {config.dataset} cannot make items: {answer.stderr.strip()[-500:]}",
    )
    others = json.loads(answer.stdout.splitlines()[-1])
    for number, other in sorted(zip(numbers, others, strict=True)):
        item = dataset[number]
        require(
            [item["question"], str(item["answer"])] == other,
            f"task.dataset: item {number} of {config.dataset} is another one in another process, "
            "so a run could not be repeated or resumed; use another dataset",
        )
