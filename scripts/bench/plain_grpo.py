"""The plain side of plain_loop.py: GRPO on the quickstart's task in one process, in PyTorch alone.

Usage: python scripts/bench/plain_grpo.py SEED EXACT_MATCH EVALUATE_EVERY [SIZE]

SIZE is a name of plain_sizes.py, 0.1m by default. Prints one JSON object: CPU-seconds since the
start of the process, steps, and the exact match.
"""

import json
import math
import os
import random
import sys
import time
from hashlib import blake2b

os.environ["OMP_NUM_THREADS"] = "1"  # a second thread costs more than it computes at this size

import torch
import torch.nn as nn
import torch.nn.functional as F
from plain_sizes import SIZES, Size

VOCABULARY = {word: n for n, word in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", "copy", "="])}
FIRST_DIGIT = len(VOCABULARY)
EOS = VOCABULARY["<eos>"]
DIGITS = 3
PROMPTS = 32
SAMPLES = 8
NEW_TOKENS = 6
EVALUATED = 256
WORDS = 16


class Block(nn.Module):
    """A layer of Qwen3: attention with normed queries and keys, then SwiGLU."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = [size.n_heads, size.n_kv_heads, size.n_kv_heads]
        width = size.n_heads * size.head_dim
        self.qkv = nn.Linear(size.dim, sum(self.heads) * size.head_dim, bias=False)
        self.out = nn.Linear(width, size.dim, bias=False)
        self.up = nn.Linear(size.dim, 2 * size.hidden_dim, bias=False)
        self.down = nn.Linear(size.hidden_dim, size.dim, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(size.dim, eps=1e-6) for _ in range(2))
        self.head_norms = nn.ModuleList(nn.RMSNorm(size.head_dim, eps=1e-6) for _ in range(2))

    def forward(self, x: torch.Tensor, rope: torch.Tensor, cache: list | None) -> torch.Tensor:
        rows = self.qkv(self.norms[0](x)).unflatten(-1, (sum(self.heads), -1)).transpose(1, 2)
        *rows, v = rows.split(self.heads, dim=1)
        q, k = (rotate(norm(each), rope) for norm, each in zip(self.head_norms, rows, strict=True))
        if cache is not None:
            if cache:
                k, v = (torch.cat(pair, dim=2) for pair in zip(cache, (k, v), strict=True))
            cache[:] = k, v
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=q.shape[2] > 1, enable_gqa=q.shape[1] > k.shape[1]
        )
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Policy(nn.Module):
    """A Qwen3 with tied embeddings."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, size.dim)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.n_layers))
        self.norm = nn.RMSNorm(size.dim, eps=1e-6)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.trunc_normal_(weight, std=0.02)
        powers = torch.arange(0, size.head_dim, 2, dtype=torch.float32) / size.head_dim
        angles = torch.outer(torch.arange(32.0), 1e6**-powers)
        self.register_buffer("rope", torch.polar(torch.ones_like(angles), angles))

    def forward(self, tokens: torch.Tensor, caches: list[list] | None = None) -> torch.Tensor:
        """Return the logits [B, L, V]. With ``caches``, ``tokens`` follow earlier ones."""
        before = caches[0][0].shape[2] if caches and caches[0] else 0
        rope = self.rope[before : before + tokens.shape[1]]
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x, rope, None if caches is None else caches[number])
        return self.norm(x) @ self.embed.weight.T


def rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Return ``x`` [B, H, L, D] with its halves rotated as pairs."""
    pairs = torch.complex(*x.float().chunk(2, dim=-1)) * rope
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def is_held_out(digits: str) -> bool:
    return int.from_bytes(blake2b(digits.encode(), digest_size=8).digest()) % 10 < 3


def prompts_of(numbers: list[str]) -> torch.Tensor:
    words = (
        [VOCABULARY["copy"], *(FIRST_DIGIT + int(d) for d in n), VOCABULARY["="]] for n in numbers
    )
    return torch.tensor([*words])


@torch.no_grad()
def sample(policy: Policy, prompts: torch.Tensor, greedy: bool = False) -> torch.Tensor:
    """Return completions [B, NEW_TOKENS], with padding 0 after <eos>."""
    caches: list[list] = [[] for _ in policy.blocks]
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    last = prompts
    drawn = []
    while len(drawn) < NEW_TOKENS and not ended.all():
        logits = policy(last, caches)[:, -1]
        chosen = logits.argmax(-1) if greedy else torch.multinomial(logits.softmax(-1), 1)[:, 0]
        drawn.append(chosen.masked_fill(ended, 0))
        ended |= chosen == EOS
        last = chosen[:, None]
    return F.pad(torch.stack(drawn, dim=1), (0, NEW_TOKENS - len(drawn)))


def lengths_of(completions: torch.Tensor) -> torch.Tensor:
    ends = completions == EOS
    return torch.where(ends.any(1), ends.int().argmax(1) + 1, NEW_TOKENS)


def score(prompts: torch.Tensor, completions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rewards, and which completions are correct."""
    wanted = F.pad(prompts[:, 1:-1], (0, 1), value=EOS)
    lengths = lengths_of(completions)
    places = torch.arange(DIGITS + 1) < lengths[:, None]
    right = ((completions[:, : DIGITS + 1] == wanted) & places).sum(1)
    correct = (right == DIGITS + 1) & (lengths == DIGITS + 1)
    return right / lengths.clamp(min=DIGITS + 1), correct


def train_step(policy: Policy, optimizer: torch.optim.Optimizer, prompts: torch.Tensor) -> None:
    """GRPO with an entropy bonus: the ratio of an update on its own samples is 1."""
    completions = sample(policy, prompts)
    groups = score(prompts, completions)[0].view(PROMPTS, SAMPLES)
    centred = groups - groups.mean(1, keepdim=True)
    advantages = (centred / (groups.std(1, keepdim=True) + 1e-6)).view(-1, 1)
    logits = policy(torch.cat([prompts, completions[:, :-1]], dim=1))[:, prompts.shape[1] - 1 :]
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, completions[..., None]).squeeze(-1)
    ratio = (chosen - chosen.detach()).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    mask = torch.arange(NEW_TOKENS) < lengths_of(completions)[:, None]
    loss = -((gain + 0.02 * entropy) * mask).sum() / mask.sum()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def main(seed: int, wanted: float, every: int, size: Size) -> None:
    torch.manual_seed(seed)
    draws = random.Random(seed)
    numbers = [f"{number:03}" for number in range(1000)]
    trained = [number for number in numbers if not is_held_out(number)]
    held_out = prompts_of([number for number in numbers if is_held_out(number)][:EVALUATED])
    policy = Policy(size)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=size.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    step = 0
    match = 0.0
    while match < wanted and step < 2000:
        prompts = prompts_of(draws.choices(trained, k=PROMPTS)).repeat_interleave(SAMPLES, dim=0)
        train_step(policy, optimizer, prompts)
        warm_up.step()
        step += 1
        if step % every == 0:
            match = score(held_out, sample(policy, held_out, greedy=True))[1].float().mean().item()
    found = match if match >= wanted else math.nan
    print(json.dumps({"cpu_s": time.process_time(), "steps": step, "exact_match": found}))


if __name__ == "__main__":
    name = sys.argv[4] if len(sys.argv) > 4 else "0.1m"
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), SIZES[name])
