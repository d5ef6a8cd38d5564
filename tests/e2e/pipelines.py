"""Tiny runs of every pipeline, whose prompts fill several blocks of the KV cache, for tests that
disturb them.
"""

from tests.e2e.runs import TINY

STEPS = 24
GROUPS = 4
DEADLINES = (
    *(
        "--deadlines.start",
        "240",
        "--deadlines.call",
        "40",
        "--deadlines.heartbeat",
        "12",
        "--deadlines.reward",
        "8",
    ),
    *("--max_restarts", "6"),
)
LONG_PROMPTS = ("--config", "tests.e2e.configs.long_prompts", *TINY[2:])
EVALUATED = ("--evaluation.every", "5", "--evaluation.at_start")
COMMON = (*LONG_PROMPTS, "--steps", str(STEPS), "--trainer.checkpoint.interval", "3", *DEADLINES)
TWO_AHEAD = (
    *(*COMMON, "--rollout.max_staleness", "2", "--generator.replicas", "2"),
    *("--rollout.max_resampled_groups", "2", *EVALUATED),
)
ASYNCHRONOUS = (
    *(
        *COMMON,
        "--rollout.max_staleness",
        "2",
        "--generator.replicas",
        "2",
        "--generator.update",
        "rolling",
    ),
    *("--rollout.pipeline", "asynchronous", "--rollout.stream_chunks", "2"),
)
SHORT_STEPS = 12
SHORT = (*TWO_AHEAD, "--steps", str(SHORT_STEPS))
LOCKSTEP = (*COMMON, "--rollout.max_resampled_groups", "2", *EVALUATED)
ONE_AHEAD = (*COMMON, "--rollout.max_staleness", "1", "--weights.digests")
