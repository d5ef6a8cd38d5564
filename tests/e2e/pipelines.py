"""Arguments of tiny runs: of every pipeline, with prompts that fill several blocks of the KV cache,
for tests that disturb runs, and of every kind that programs read.
"""

import pytest

from tests.kit.runs import LR, TINY, words
from tests.kit.tables import cases

STEPS = 24
GROUPS = 4
DEADLINES = (
    *words("--deadlines.start 240 --deadlines.call 40 --deadlines.heartbeat 12"),
    *words("--deadlines.reward 8 --max_restarts 6"),
)
COMMON = (
    *("--config", "tests.e2e.configs.long_prompts", *TINY[2:], "--steps", str(STEPS)),
    *("--trainer.checkpoint.interval", "3", *DEADLINES),
)
EVALUATED = words("--evaluation.every 5 --evaluation.at_start --rollout.max_resampled_groups 2")
AHEAD = (*COMMON, *words("--rollout.max_staleness 2 --generator.replicas 2"))
TWO_AHEAD = (*AHEAD, *EVALUATED)
ASYNCHRONOUS = (
    *(*AHEAD, "--generator.update", "rolling"),
    *words("--rollout.pipeline asynchronous --rollout.stream_chunks 2"),
)
SHORT_STEPS = 12
SHORT = (*TWO_AHEAD, "--steps", str(SHORT_STEPS))
LOCKSTEP = (*COMMON, *EVALUATED)
ONE_AHEAD = (*COMMON, "--rollout.max_staleness", "1", "--weights.digests")

MANY_MODELS = (
    *("--config", "tests.e2e.configs.many_models", *TINY[2:], "--steps", "4"),
    *words("--trainer.checkpoint.interval 2 --evaluation.every 2 --evaluation.at_start"),
    *words("--evaluation.prompts 64 --evaluation.samples 2 --rollout.final_temperature 0.7"),
    # so that each step changes the scores
    *(LR, "0.01", "--trainer.lr_scheduler.warmup_steps", "0", "trainer.lora:on"),
)
"""Arguments of a run of a policy with an adapter, a critic and a reference, with several updates a
step.
"""
EXPERTS = words("--model.num_experts 4 --model.experts_per_token 2 --model.moe_hidden_dim 96")
REPLAYED = (
    *(*TWO_AHEAD, *EXPERTS, "--trainer.router_replay", "generator"),
    *("--generator.expert_parallel", "--generator.tensor_parallel_degree", "2"),
)
"""Arguments of a run that trains a mixture of experts with the experts of its generators."""
HYBRID = (*LOCKSTEP, *words("--model.family qwen3_5_text --generator.kv_cache_gib 0.1"))
"""Arguments of a run of a model with gated delta nets."""
EXACT = (*TWO_AHEAD, *words("--parity bitwise --watchdog.parity fail"))
TOOLS = (
    *words("--config tests.e2e.configs.held_tools --steps 12 --rollout.prompts_per_step 2"),
    *words("--rollout.samples_per_prompt 4 --generator.kv_cache_gib 0.1"),
    *words("--evaluation.prompts 4 --evaluation.samples 0 --evaluation.every 5"),
    *("--trainer.checkpoint.interval", "2"),
    *(LR, "1e-5"),  # a larger step may teach the policy to call no tools
)
CONFIGS = {
    "sft": "sft_jsonl",
    "dpo": "dpo_jsonl",
    "cached": "dpo_jsonl",
    "reward model": "reward_model_jsonl",
    "sampled": "tests.e2e.configs.sampled_sft",
}
LONG = pytest.mark.long


def each_kind(*often: str) -> pytest.MarkDecorator:
    """Give a test each kind of runs that programs read. Kinds that are not ``often`` are long."""
    kinds = ("models", "demonstrations", *CONFIGS)
    return pytest.mark.parametrize("kind", cases(kinds, often))
