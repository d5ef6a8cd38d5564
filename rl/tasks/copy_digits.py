"""Task of copying digits, which a small policy learns from random weights."""

import random
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Annotated

from rl.environments.task import Score, Task
from rl.errors import require
from rl.model.shape import ModelConfig
from rl.types import Completion, Prompt
from rl.types.rules import at_least

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Sixteen words, which tensor parallel degrees of 2, 4, 8 and 16 divide.
WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", "copy", "=", *"0123456789"]
TOKEN = {word: token for token, word in enumerate(WORDS)}


class CopyDigits(Task):
    """Task whose prompt ``copy 3 1 7 =`` has the answer ``3 1 7 <eos>``.

    Three of ten strings are held out, by their hash.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        digits: Annotated[int, at_least(1, 4000)] = 3
        """Number of digits to copy; the correct completion is one token longer."""

        max_prompt_tokens: Annotated[int, at_least(1, 10**8)] = 16
        """Maximum length of a prompt, in tokens; a prompt is two longer than its digits."""

    config: Config

    def __init__(self, config: Config, *, seed: int, model: ModelConfig):
        super().__init__(config, seed=seed, model=model)
        digits = config.digits
        require(digits >= 1, f"task.digits: {digits} leaves nothing to copy; set 1 or more")
        limit, field = self.prompt_limit()
        require(
            digits + 2 <= limit,
            f"{digits} digits make prompts of {digits + 2} tokens, longer than {field} allows",
            field="task.digits",
            fix="lower task.digits or raise the limit",
        )
        self.set_tokenizer(word_tokenizer(), stop_token_ids=(TOKEN["<eos>"],))

    def prompt(self, prompt_id: int) -> Prompt:
        draws = random.Random(f"copy digits/{self.seed}/{prompt_id}")
        while is_held_out(digits := "".join(draws.choices("0123456789", k=self.config.digits))):
            pass
        return make_prompt(prompt_id, digits)

    def eval_prompts(self, count: int) -> list[Prompt]:
        size = 10**self.config.digits
        # A stride coprime to 10 visits every number once, in an irregular order.
        numbers = (f"{place * 618033988749 % size:0{self.config.digits}}" for place in range(size))
        held_out = islice(filter(is_held_out, numbers), count)
        return [make_prompt(prompt_id, digits) for prompt_id, digits in enumerate(held_out)]

    def score(self, prompt: Prompt, text: str, completion: Completion) -> Score:
        """Return a reward in [0, 1]: the number of tokens in their right places over the length of
        the answer or the completion, whichever is longer. The answer includes ``<eos>``.
        """
        wanted = [*(TOKEN[digit] for digit in prompt.answer.split()), TOKEN["<eos>"]]
        right = sum(token == want for token, want in zip(completion.tokens, wanted, strict=False))
        reward = right / max(len(wanted), len(completion.tokens))
        return Score(reward=reward, correct=completion.tokens == wanted)


def make_prompt(prompt_id: int, digits: str) -> Prompt:
    """Return the prompt that asks for ``digits``, e.g. ``"317"``."""
    words = ["copy", *digits, "="]
    tokens = [TOKEN[word] for word in words]
    return Prompt(prompt_id=prompt_id, tokens=tokens, text=" ".join(words), answer=" ".join(digits))


def is_held_out(digits: str) -> bool:
    """Whether ``digits`` belong to evaluation, which depends on the string alone."""
    return int.from_bytes(blake2b(digits.encode(), digest_size=8).digest()) % 10 < 3


def word_tokenizer() -> "PreTrainedTokenizerFast":
    """Return a tokenizer with one token for each of WORDS, separated by spaces."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel(TOKEN, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )
