"""Policy that answers in ways no chat template would write, its engine and its environment."""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerFast

from rl.types import Completion
from rl.types.routed_experts import RoutedExperts
from tests.kit.tokenizers import qwen3

HABITS = (
    "plain", "odd tokens", "spacing", "key order", "numbers", "white space", "invalid JSON",
    "nested markup", "several calls", "text after call", "empty", "no call", "thinking, stopped",
    "thinking, cut", "cut in call", "cut in text", "endoftext", "two thoughts", "stray control",
    "random tokens",
)  # fmt: skip
SPACINGS = ({"separators": (",", ":")}, {"indent": 2}, {"indent": 0})
BROKEN = ('{"name": "add", "arguments": {"a": 1}', "{'name': 'add'}", '{"arguments": {}}', "[1]")
NESTED = {"name": "add", "arguments": {"a": 1, "note": "say <tool_call> </think> twice"}}
NUMBERS = '{"name": "add", "arguments": {"a": 1.50, "b": 1e2, "c": "caf\\u00e9 \\/ é"}}'


@dataclass
class Adversary:
    """Source of answers, as tokens, each with an oddity of :data:`HABITS`."""

    tokenizer: PreTrainedTokenizerFast
    rng: random.Random
    thinking: bool

    def answer(self, habit: str) -> list[int]:
        """Return the tokens of an answer, at least one."""
        rng = self.rng
        if habit == "random tokens":
            words = [*set(range(len(self.tokenizer))) - {*self.tokenizer.added_tokens_decoder}]
            return rng.choices(words, k=rng.randint(1, 30)) + self.encode(rng.choice(["", STOP]))
        thinks = self.thinking and rng.random() < 0.7
        thought = f"<think>\nlet me add {rng.randint(1, 99)}…\n</think>\n\n" if thinks else ""
        begin = thought + rng.choice(["", "I will add. ", "Sum:\n"])
        call = self.call(habit)
        whole = {
            "several calls": lambda: begin + "\n".join([call] * rng.randint(2, 4)) + STOP,
            "text after call": lambda: f"{begin}{call}\nDone, is it not?{call}{STOP}",
            "empty": lambda: STOP,
            "no call": lambda: f"{thought}The answer is 42. {STOP}",
            "thinking, stopped": lambda: f"<think>\nI never stop thinking{STOP}",
            "thinking, cut": lambda: "<think>\nI never stop thinking and",
            "cut in call": lambda: begin + call[: rng.randint(12, 40)],
            "cut in text": lambda: f"{thought}The answer is",
            "endoftext": lambda: f"{begin}{call}<|endoftext|>",
            "two thoughts": lambda: f"<think>\na\n</think>\n\nb <think>c</think> d </think>{call}",
            "stray control": lambda: f"{begin}{rng.choice(STRAY)}{call}{STOP}",
        }.get(habit, lambda: begin + call + STOP)()
        return self.split(whole) if habit == "odd tokens" else self.encode(whole)

    def call(self, habit: str) -> str:
        """Return the text of a tool call."""
        rng = self.rng
        arguments = {"a": rng.randint(-9, 99), "loud": rng.choice([True, False, None])}
        plain = {"name": "add", "arguments": arguments}
        body: Callable[[], str] = {
            "spacing": lambda: json.dumps(plain, **rng.choice(SPACINGS)),
            "key order": lambda: json.dumps(dict(reversed(plain.items()))),
            "numbers": lambda: NUMBERS,
            "nested markup": lambda: json.dumps(NESTED),
            "invalid JSON": lambda: rng.choice(BROKEN),
            "white space": lambda: f"\n  {json.dumps(plain)} ",
        }.get(habit, lambda: json.dumps(plain))
        return f"<tool_call>\n{body()}\n</tool_call>"

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text``, markup included."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def split(self, text: str) -> list[int]:
        """Return ``text`` in tokens that no encoder would choose; control tokens stay whole."""
        return [piece for token in self.encode(text) for piece in self._pieces(token)]

    def _pieces(self, token: int) -> Iterator[int]:
        text = self.tokenizer.decode([token])
        is_control = token in self.tokenizer.added_tokens_decoder
        if is_control or len(text) < 2 or "\ufffd" in text or self.rng.random() < 0.5:
            yield token
            return
        cut = self.rng.randint(1, len(text) - 1)
        yield from self.encode(text[:cut])
        yield from self.encode(text[cut:])


STOP = "<|im_end|>"
STRAY = ("<|im_start|>", "<tool_response>", "</tool_call>")


def reply(rng: random.Random, calls: int, *, text: str = "") -> list[dict[str, str]]:
    """Return what an environment writes after an answer with ``calls`` tool calls."""
    if calls:
        return [{"role": "tool", "content": text or str(rng.randint(0, 99))} for _ in range(calls)]
    if rng.random() < 0.5:
        return [{"role": "user", "content": text or "Go on, please."}]
    return [{"role": "tool", "content": text or "error: no call was found"}]


class Engine:
    """Generator whose policy is an adversary; it keeps every request and completion."""

    def __init__(self, habits=HABITS, seed=0):
        rng = random.Random(seed)
        self._habits = habits
        self._rng = rng
        self._adversary = Adversary(qwen3(), rng, True)
        self.rounds = []
        self.versions = itertools.count()

    async def __call__(self, requests):
        version = next(self.versions)
        completions = [self._complete(request, version) for request in requests]
        self.rounds.append([*zip(requests, completions, strict=True)])
        return completions

    def _complete(self, request, version):
        answer = self._adversary.answer(self._rng.choice(self._habits))
        tokens = answer[: request.sampling.max_tokens]
        reason = "length" if len(answer) > len(tokens) else "stop"
        logprobs = [-float(n) - 1 for n in range(len(tokens))]
        count = request.sampling.top_logprobs
        experts = np.full((len(request.prompt_tokens) + len(tokens), 1, 1), 255, dtype=np.uint8)
        experts[request.experts_from : -1] = version
        return Completion(
            tokens=tokens,
            logprobs=logprobs,
            versions=[version] * len(tokens),
            finish_reason=reason,
            top_logprobs=[dict.fromkeys(range(count), -1.0) for _ in tokens] if count else None,
            experts=RoutedExperts(experts),
        )
