"""Task of word problems with numeric answers, from a JSONL file in GSM8K's format."""

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

from rl.data.jsonl import read_rows
from rl.tasks.base import Score
from rl.tasks.chat import Problem
from rl.tasks.chat_jsonl import ChatJsonl
from rl.tasks.math_answer import final_answer, reference_number, same_value
from rl.types import Completion, Prompt


class Gsm8kJsonl(ChatJsonl):
    """Task of lines ``{"question": …, "answer": "… #### 42"}``; reward 1 for the number, else 0.

    Tokenizer and chat template are those of ``model.hf_path``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChatJsonl.Config):
        path: str = ""
        """JSONL file. Each line has ``question`` and ``answer``, which ends in ``#### NUMBER``."""

        instruction: str = (
            "Think step by step, then give the answer on a line of its own, as: #### NUMBER"
        )
        """Text that follows each question in the user's message."""

    config: Config
    can_only_score: ClassVar[bool] = True

    def __init__(self, config: Config, **options: Any):
        # math_verify warns that its timeouts are off, which is intended.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        super().__init__(config, **options)

    def read_problems(self) -> list[Problem]:
        problems = []
        for row in read_rows(
            self.config.path, field="task.path", form='{"question": …, "answer": …}'
        ):
            question = row.text("question").strip()
            answer = reference_number(row.text("answer"))
            if answer is None:
                problem = "field 'answer' does not end in '#### NUMBER'"
                raise row.error(problem, fix="add the number")
            problems.append(Problem(number=row.line, question=question, answer=answer))
        return problems

    def score(self, prompt: Prompt, text: str, completion: Completion) -> Score:
        """Return the score. Metric ``answered``: the text has a value; ``format``: the value is
        marked by ``####`` or ``\\boxed``.
        """
        answer, marked = final_answer(text)
        correct = answer is not None and same_value(answer, prompt.answer)
        metrics = {"answered": float(answer is not None), "format": float(marked)}
        return Score(reward=float(correct), correct=correct, metrics=metrics)
