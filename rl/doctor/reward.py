"""Checks of a task's reward, on made-up completions."""

import asyncio
import random
import threading
from collections.abc import Iterator

from rl.config import RLConfig
from rl.config.users_code import users_code
from rl.doctor.findings import Finding, error, warning
from rl.environments.protocol import EnvironmentTask
from rl.environments.task import Task
from rl.errors import ConfigError, GroupLost, shown
from rl.rollout.episodes import played
from rl.rollout.prompts import training_prompt
from rl.rollout.scoring import score_group
from rl.types import Completion, Prompt

PROMPTS = 4
RANDOM_TOKENS = 16
DEADLINE_S = 20.0
FORMS = ("{}", "#### {}", "\\boxed{{{}}}", "<answer>{}</answer>")
"""Forms in which a reward may look for the reference answer."""

Scores = dict[str, list[float]]
"""Rewards by kind of completion: ``reference``, ``empty`` and ``random``."""


def check_reward(config: RLConfig, task: Task) -> Iterator[Finding]:
    """Yield what the reward of the first prompts has wrong."""
    prompts = [training_prompt(task, number) for number in range(PROMPTS)]
    scorer = task
    try:
        if vars(type(task)).get("can_only_score"):  # builds it without reading the data
            with users_code("task: building it with only_scores=True"):
                scorer = config.task.build_scorer(seed=config.seed, model=config.model)
    except ConfigError as reason:
        yield error("reward", "task", str(reason), "have the constructor take only_scores=True")
        return
    name = type(task).__name__
    trials = list[Scores | GroupLost]()
    again = list[Scores | GroupLost]()

    def score() -> None:
        for rows in (trials, again):
            rows += (_scores(scorer, prompt, config.rollout.max_tokens) for prompt in prompts)

    thread = threading.Thread(target=score, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    if thread.is_alive():
        what = f"{len(trials) + len(again)} of {2 * PROMPTS} groups were scored in {DEADLINE_S} s"
        fix = "see whether it hangs, or raise rollout.reward_workers"
        yield warning("reward", name, what, fix)
    lost = [trial for trial in trials if isinstance(trial, GroupLost)]
    if lost:
        what = str(lost[0]).splitlines()[0]
        stands = error if len(lost) / len(trials) > config.rollout.max_lost else warning
        fix = "return a Score of finite numbers for any text"
        if isinstance(task, EnvironmentTask):
            fix = "correct it there, and try it with python -m rl.play"
        yield stands("reward", name, what, fix)
    scored = [trial for trial in trials if not isinstance(trial, GroupLost)]
    for first, second in zip(trials, again, strict=False):
        if first != second and not isinstance(first, GroupLost):
            what = f"the same completions have the rewards {shown(first)} and {shown(second)}"
            fix = "derive what is random from prompt and completion; else no run can be repeated"
            yield warning("reward", name, what, fix)
            return
    answered = [s for s, prompt in zip(scored, prompts, strict=False) if prompt.answer]
    if answered and not lost and not isinstance(task, EnvironmentTask):
        yield from _check_levels(name, answered)


def _check_levels(name: str, answered: list[Scores]) -> Iterator[Finding]:
    rewards = {reward for each in answered for values in each.values() for reward in values}
    fix = "compare with prompt.answer what the text ends in, and give nothing for no answer"
    if len(rewards) == 1:
        what = f"is {rewards.pop()} for the reference answer, no text and random tokens alike"
        yield warning("reward", name, what, fix)
    elif all(max(each["reference"]) <= each["empty"][0] for each in answered):
        what = f"no text gets {answered[0]['empty'][0]}, the reference answer "
        what += f"{max(answered[0]['reference'])}"
        yield warning("reward", name, what, fix)


def _scores(task: Task, prompt: Prompt, room: int) -> Scores | GroupLost:
    stop = task.stop_token_ids[:1]
    draws = random.Random(prompt.prompt_id)
    words = [each for each in range(len(task.tokenizer)) if each not in task.stop_token_ids]
    texts = [form.format(prompt.answer) for form in FORMS]
    completions = {
        "reference": [task.tokenizer.encode(text, add_special_tokens=False) for text in texts],
        "empty": [[]],
        "random": [draws.choices(words, k=min(RANDOM_TOKENS, max(1, room - 1)))],
    }
    found: Scores = {}
    for kind, rows in completions.items():
        group = [Completion.written([*row, *stop] or [0]) for row in rows]
        try:
            if isinstance(task, EnvironmentTask):
                ends = [asyncio.run(played(task, prompt, completion)) for completion in group]
                found[kind] = [end.reward for end in ends if end is not None]
            else:
                scored = score_group(task, prompt, group)
                found[kind] = [score.reward for _, score in scored]
        except GroupLost as lost:
            return lost
    return found
