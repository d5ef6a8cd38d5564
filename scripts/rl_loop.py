"""GRPO on copying digits, written out on a session: about two minutes on a laptop's CPU.

Run it as ``python scripts/rl_loop.py [STEPS]``.
"""

import asyncio
import sys

import torch

import rl
from rl.tasks.copy_digits import CopyDigits

STEPS = 200
PROMPTS = 32  # of each step
SAMPLES = 8  # of each prompt
MAX_TOKENS = 6
LEARNING_RATE = 1e-3
WARMUP_STEPS = 10


async def main(steps: int = STEPS) -> None:
    # A Qwen3 of 100 thousand parameters, one process that trains it and one that samples.
    config = rl.SessionConfig(
        model=rl.ModelConfig(
            vocab_size=16,
            dim=64,
            n_layers=2,
            n_heads=2,
            n_kv_heads=2,
            head_dim=32,
            hidden_dim=192,
            max_seq_len=32,
        ),
        trainer=rl.TrainerConfig(micro_batch_size=256),
        generator=rl.GeneratorConfig(kv_cache_gib=0.05),
    )
    task = CopyDigits.Config(digits=3).build(seed=config.seed, model=config.model)
    loss = rl.losses.grpo(entropy_coef=0.02)

    async with rl.Session(config, task=task.config) as session:
        for step in range(steps):
            # Sample completions of prompts that were never seen before, and score them.
            prompts = [task.prompt(step * PROMPTS + number) for number in range(PROMPTS)]
            rollouts = await session.rollout(task, prompts, samples=SAMPLES, max_tokens=MAX_TOKENS)

            # Compute advantages: compare each reward with the other rewards of its prompt.
            rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
            groups = rewards.view(-1, SAMPLES)
            centred = groups - groups.mean(dim=1, keepdim=True)
            advantages = (centred / (groups.std(dim=1, keepdim=True) + 1e-6)).float().flatten()

            # Take one optimizer step, and push the new weights to the generator.
            batch = rl.make_batch(rollouts, advantages)
            await session.forward_backward(batch, loss)
            lr = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS)
            metrics = await session.optim_step(lr=lr, weight_decay=0.0)
            version = await session.push()
            print(
                f"step {step + 1:3}  policy {version:3}  reward {rewards.mean():.3f}  "
                f"entropy {metrics['entropy/mean']:.3f}",
                flush=True,
            )

        # Evaluate with greedy decoding on held-out prompts.
        held_out = task.eval_prompts(256)
        rollouts = await session.rollout(
            task, held_out, samples=1, max_tokens=MAX_TOKENS, temperature=0.0
        )
        exact = sum(rollout.metrics["correct"] for rollout in rollouts) / len(held_out)
        print(f"exact match {exact:.3f} on {len(held_out)} held-out prompts")


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
