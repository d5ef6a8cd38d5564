"""Task of instructions whose observance a program checks, in the form of IFEval."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

from rl.data.jsonl import Row
from rl.dialects.answers import without_thoughts
from rl.environments.task import Score
from rl.errors import nearest, require, shown
from rl.metrics import Entry, Value
from rl.tasks.chat import ChatJsonl, Problem
from rl.tasks.instructions import RULES, follows, loosened
from rl.types import Completion, Prompt

FORM = '{"prompt": …, "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}'


class IFEval(ChatJsonl):
    """Task of rows ``{"prompt": …, "instruction_id_list": [id, …], "kwargs": [options, …]}``.

    The reward is the share of a prompt's instructions that the answer follows. A completion is
    correct if it follows all of them. Thoughts are not part of the answer.

    Tokenizer and chat template are those of ``model.hf_path``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChatJsonl.Config):
        pass

    config: Config
    can_only_score: ClassVar[bool] = True

    def read_problems(self) -> Iterator[Problem]:
        for row in self.rows(FORM):
            question = row.text("prompt")
            answer = json.dumps(read_instructions(row))
            yield Problem(number=row.line, question=question, answer=answer)

    def score(self, prompt: Prompt, text: str, completion: Completion) -> Score:
        """Return the score. Metric ``instructions``: share of all instructions that are followed;
        ``instructions_loose`` and ``loose``: shares of instructions and of prompts if a variant of
        the answer may follow, see :func:`rl.tasks.instructions.loosened`.
        """
        instructions = json.loads(prompt.answer)
        answer = without_thoughts(text, prompt)
        strict = [bool(answer) and follows(answer, *rule) for rule in instructions]
        loose = [any(follows(part, *rule) for part in loosened(answer)) for rule in instructions]
        count = len(instructions)
        metrics: dict[str, Entry] = {
            "instructions": Value.of(fmean(strict), weight=count),
            "instructions_loose": Value.of(fmean(loose), weight=count),
            "loose": float(all(loose)),
        }
        return Score(reward=fmean(strict), correct=all(strict), metrics=metrics)


def read_instructions(row: Row) -> list[tuple[str, dict[str, Any]]]:
    """Return the instructions of a row, each with its options that are not null.

    Raises ConfigError if an instruction is unknown, its options do not fit, or a package that its
    rule needs is missing.
    """
    names = row.value.get("instruction_id_list")
    options = row.value.get("kwargs")
    if not (
        isinstance(names, list) and isinstance(options, list) and 0 < len(names) == len(options)
    ):
        problem = f"'instruction_id_list' is {shown(names)} and 'kwargs' {shown(options)}"
        raise row.error(f"{problem}; write two lists of one length")
    instructions = []
    for name, arguments in zip(names, options, strict=True):
        known = f"{nearest(str(name), RULES)}rl.tasks.instructions has all"
        require(name in RULES, f"{row.where}: no instruction {name!r}", field=row.field, fix=known)
        present = {key: value for key, value in (arguments or {}).items() if value is not None}
        try:
            for word in ("word", "WORD"):
                follows(word, name, present)
        except (ImportError, LookupError) as error:
            fix = "pip install 'tiller-rl[benchmarks]'; python -m nltk.downloader punkt_tab"
            raise row.error(f"{name} cannot be checked: {shown(str(error))}", fix=fix) from None
        except Exception as error:  # options of a wrong name, type or pattern
            raise row.error(f"the options {shown(present)} of {name}: {error}") from None
        instructions.append((name, present))
    return instructions
