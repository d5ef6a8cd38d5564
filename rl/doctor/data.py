"""Checks of the input of a run: the task with its prompts, the tokenizer and its chat template, and
the task's reward on made-up completions.
"""

import asyncio
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rl.config import RLConfig, RunConfig
from rl.config.users_code import users_code
from rl.dialects.choose import dialect_of
from rl.dialects.dialect import ConversationError
from rl.dialects.template import template_stops, template_text
from rl.doctor.findings import Finding, error, refused, warning
from rl.environments.protocol import EnvironmentTask
from rl.environments.task import Task
from rl.errors import ConfigError, GroupLost, RunError, shown
from rl.model.tokenizer import load_tokenizer, named_stop_tokens
from rl.rollout.episodes import played
from rl.rollout.prompts import training_prompt
from rl.rollout.scoring import score_group
from rl.trainers.evaluation import held_out_prompts
from rl.trainers.trainer import trainer_of
from rl.trainers.trial import build_algorithm, build_task
from rl.types import Completion, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


MOST_PROMPTS = 1000
ANSWER = "It is 42."
QUESTION = [{"role": "user", "content": "What is it?"}]


def check_trainer(config: RunConfig) -> Iterator[Finding]:
    """Yield why a trainer without a task refuses its data, or what is wrong with its examples."""
    try:
        trainer: Any = trainer_of(replace(config, quiet=True))
    except ConfigError as reason:
        yield refused("data", reason)
        return
    trained, held_out = (
        [*map(trainer.key, examples)] for examples in (trainer.dataset_train, trainer.dataset_eval)
    )
    both = {*trained} & {*held_out}
    if both:
        what = f"{len(both)} of {len(held_out)} held-out examples are trained on"
        yield warning("data", "held-out examples", what, "remove the copies from the training data")


def check_inputs(config: RLConfig) -> tuple[Task | None, list[Finding]]:
    """Build the task and the algorithm. Return the task and what is wrong with them."""
    task = None
    findings = list[Finding]()
    try:
        task = build_task(replace(config, quiet=True))
    except ConfigError as reason:
        findings.append(refused("data", reason))
        if config.model.hf_path is not None:
            try:
                load_tokenizer(config.model.hf_path)
            except ConfigError as damage:
                findings.append(refused("data", damage))
    try:
        build_algorithm(config)
    except ConfigError as reason:
        findings.append(refused("config", reason))
    return task, findings


def check_template(
    tokenizer: "PreTrainedTokenizerFast", stop_token_ids: Sequence[int]
) -> Iterator[Finding]:
    """Yield a finding for each property of the chat template that training or generation needs
    and that the template lacks.
    """
    if not tokenizer.chat_template:
        return
    named = named_stop_tokens(tokenizer) | {"the chat template": template_stops(tokenizer)}
    words = ((source, tokenizer.convert_ids_to_tokens(ids)) for source, ids in named.items())
    what = ", ".join(f"{source} names {' '.join(texts) or 'none'}" for source, texts in words)
    yield Finding("data", "note", "stop tokens", what, "")
    where = "chat template"
    advice = "use the template of the instruction-tuned model"
    try:
        opened = template_text(tokenizer, QUESTION, None, add_generation_prompt=True)
        messages = [*QUESTION, {"role": "assistant", "content": ANSWER}]
        answered = template_text(tokenizer, messages, None, add_generation_prompt=False)
    except ConversationError as reason:
        yield error("data", where, str(reason), advice)
        return
    if not answered.startswith(opened):
        what = f"a prompt is {shown(opened[-60:])}, which no answered conversation begins with"
        yield warning("data", where, what, advice)
    end = answered.rpartition(ANSWER)[2]
    tokens = tokenizer.encode(end, add_special_tokens=False)
    if ANSWER not in answered:
        yield warning("data", where, "it leaves out what the assistant says", advice)
    elif not {*tokens} & {*stop_token_ids}:
        stops = tokenizer.convert_ids_to_tokens([*stop_token_ids])
        what = f"an answer ends in {shown(end)}, and none of the stop tokens {stops} is in it"
        fix = "add the token to eos_token_id in generation_config.json; without it no answer ends"
        yield warning("data", where, what, fix)
    try:
        dialect_of(tokenizer)
    except ConfigError as reason:
        what = f"{reason.problem}: conversations of several turns are refused"
        yield warning("data", where, what, reason.fix)


def check_prompts(config: RLConfig, task: Task) -> Iterator[Finding]:
    """Yield what the first prompts of a task that was built have wrong."""
    each_step = config.rollout.prompts_per_step
    try:
        prompts = [training_prompt(task, number) for number in range(MOST_PROMPTS)]
        held_out = held_out_prompts(config.evaluation, task)
    except RunError as reason:
        yield refused("data", reason, "task")
        return
    first = {_key(prompt) for prompt in prompts[:each_step]}
    looked_at = min(each_step, MOST_PROMPTS)
    if 2 * len(first) < looked_at:
        what = f"the first step has {len(first)} different prompts of {looked_at}"
        fix = "add data, or lower rollout.prompts_per_step and raise samples_per_prompt"
        yield warning("data", "task", what, fix)
    known = {_key(prompt): prompt for prompt in prompts}
    both = [prompt for prompt in held_out if _key(prompt) in known]
    if both:
        what = f"{len(both)} of {len(held_out)} held-out prompts are trained on"
        what += f", as {shown(both[0].text[:80])}"
        yield warning("data", "held-out prompts", what, "remove the copies from the training data")
    others = [p for p in prompts if p.answer.strip() != known[_key(p)].answer.strip()]
    if others:
        pair = (known[_key(others[0])].answer, others[0].answer)
        what = f"one prompt has the answers {shown(pair[0])} and {shown(pair[1])}"
        what += f": {shown(others[0].text[:80])}"
        yield warning("data", "training prompts", what, "remove one of the examples")
    yield from _check_lengths(config, task, prompts)


def _check_lengths(config: RLConfig, task: Task, prompts: list[Prompt]) -> Iterator[Finding]:
    ended = sum(prompt.tokens[-1:] == [stop] for prompt in prompts for stop in task.stop_token_ids)
    if ended:
        what = f"{ended} of {len(prompts)} prompts end in a stop token: the answer is over"
        fix = "encode prompts with add_special_tokens=False, and with add_generation_prompt=True"
        yield warning("data", "training prompts", what, fix)
    start = task.tokenizer.bos_token_id
    if start is not None and any(prompt.tokens[:2] == [start, start] for prompt in prompts):
        what = "a prompt begins with bos_token twice, of the chat template and of the tokenizer"
        fix = "encode prompts with add_special_tokens=False"
        yield warning("data", "training prompts", what, fix)
    most = config.rollout.max_tokens
    answers = [prompt.answer for prompt in prompts]
    rows = task.tokenizer(answers, add_special_tokens=False)["input_ids"]
    long = [len(row) + 1 for row in rows if len(row) + 1 > most]
    if long:
        what = f"is {most}; {len(long)} of {len(prompts)} answers are longer, up to {max(long)}"
        yield warning("data", "rollout.max_tokens", what, f"set it to {max(long)} or more")


def _key(prompt: Prompt) -> str:
    """Return what prompts that differ in case and white space alone have in common."""
    text = " ".join(prompt.text.split()).casefold()
    return f"{prompt.task} {text or prompt.tokens or prompt.prompt_id}"


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
    rewards = {reward for scores in answered for values in scores.values() for reward in values}
    fix = "compare with prompt.answer what the text ends in, and give nothing for no answer"
    if len(rewards) == 1:
        what = f"is {rewards.pop()} for the reference answer, no text and random tokens alike"
        yield warning("reward", name, what, fix)
    elif all(max(scores["reference"]) <= scores["empty"][0] for scores in answered):
        what = f"no text gets {answered[0]['empty'][0]}, the reference answer "
        what += f"{max(answered[0]['reference'])}"
        yield warning("reward", name, what, fix)


def _scores(task: Task, prompt: Prompt, room: int) -> Scores | GroupLost:
    stop = task.stop_token_ids[:1]
    draws = random.Random(prompt.prompt_id)
    words = [token for token in range(len(task.tokenizer)) if token not in task.stop_token_ids]
    texts = [form.format(prompt.answer) for form in FORMS]
    completions = {
        "reference": [task.tokenizer.encode(text, add_special_tokens=False) for text in texts],
        "empty": [[]],
        "random": [draws.choices(words, k=min(RANDOM_TOKENS, max(1, room - 1)))],
    }
    scores: Scores = {}
    for kind, rows in completions.items():
        group = [Completion.written([*row, *stop] or [0]) for row in rows]
        try:
            if isinstance(task, EnvironmentTask):
                ends = [asyncio.run(played(task, prompt, completion)) for completion in group]
                scores[kind] = [end.reward for end in ends if end is not None]
            else:
                scored = score_group(task, prompt, group)
                scores[kind] = [score.reward for _, score in scored if score.reward is not None]
        except GroupLost as lost:
            return lost
    return scores
