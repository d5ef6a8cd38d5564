"""The work that TRL's GRPOTrainer and Tiller both do, by kind.

Both sides read this file, in separate environments, so it imports only what needs no package.
"""

import random
from dataclasses import dataclass
from typing import Any

CLIP = 0.2
MAX_NORM = 1.0


@dataclass(frozen=True)
class Work:
    """One kind of work: a step of GRPO on prompts of random words or on word problems."""

    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int
    """Length of the longest completion."""
    words: int
    """Size of the vocabulary."""
    ends: bool
    """Whether the token END ends a completion. Otherwise all completions are the longest."""
    learning_rate: float
    warm_up: int
    """Number of steps in which torch.compile compiles for all lengths. These do not count."""
    published: bool = False
    """Whether a published model answers word problems (scripts/real_model.py). ``prompt_tokens`` is
    the length of the longest prompt then."""

    @property
    def model(self) -> dict[str, Any]:
        """The model, as fields of rl.model.shape.ModelConfig: 3.3 million parameters with 512
        words, 3.0 million with 32.
        """
        return {
            "vocab_size": self.words,
            "dim": 256,
            "n_layers": 4,
            "n_heads": 4,
            "n_kv_heads": 2,
            "head_dim": 64,
            "hidden_dim": 768,
            "max_seq_len": self.prompt_tokens + self.new_tokens,
        }

    def prompt_text(self, prompt_id: int) -> str:
        """Return words of the tokenizer that against_trl.py writes."""
        draw = random.Random(f"prompt/{prompt_id}")
        return " ".join(f"w{draw.randrange(self.words)}" for _ in range(self.prompt_tokens))

    def reward(self, tokens: list[int]) -> float:
        """Return the share of even tokens, without the end: cheap, and learned within a few steps.
        It does not depend on the length.
        """
        kept = [token for token in tokens if not (self.ends and token == END)]
        return sum(token % 2 == 0 for token in kept) / max(1, len(kept))


INSTRUCTION = "Think step by step, then give the answer on a line of its own, as: #### NUMBER"
"""Text that follows each word problem."""
END = 1
"""Token that ends a completion of work that ``ends``. Its logit is 0, so that a random model draws
it once in about ``words`` tokens, whatever the tokens before are."""

REAL = Work(8, 8, 128, 96, 49_152, ends=True, learning_rate=1e-5, warm_up=1, published=True)
WORKS = {
    "uniform": Work(8, 8, 16, 32, words=512, ends=False, learning_rate=1e-3, warm_up=4),
    # the model hardly changes, and so do the lengths
    "varied": Work(8, 8, 16, 128, words=32, ends=True, learning_rate=1e-6, warm_up=16),
    "long_prompts": Work(4, 8, 512, 64, words=512, ends=False, learning_rate=1e-3, warm_up=4),
    "real": REAL,
    "real_defaults": REAL,
}
MODEL = WORKS["uniform"].model
