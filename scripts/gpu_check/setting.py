"""Setting of the checks: the device, and the models and configs that fit it."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan.components.optimizer import default_adamw
from torchtitan.config import TrainingConfig

from configs.qwen3 import qwen3_0_6b
from rl.generation.generator_config import GeneratorConfig
from rl.model.shape import ModelConfig
from rl.session.session_config import SessionConfig
from rl.training.trainer_config import TrainerConfig
from rl.weights.transport import WeightPushConfig

QWEN3_0_6B = replace(qwen3_0_6b().model, max_seq_len=65_536)
TINY = ModelConfig(
    vocab_size=64,
    dim=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=32,
    hidden_dim=96,
    max_seq_len=256,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Device of the checks, with a model that fits it: ``cpu`` is a stand-in with a tiny one."""

    device: str
    folder: Path
    """Folder for logs and runs."""
    hf_path: str = ""
    """Weights to check with; random weights of Qwen3-0.6B by default."""

    @property
    def cuda(self) -> bool:
        """Whether the checks run on GPUs."""
        return self.device == "cuda"

    @property
    def requests(self) -> int:
        """Number of completions that log-probs are compared on."""
        return 16 if self.cuda else 4

    @property
    def max_tokens(self) -> int:
        """Length of a completion."""
        return 256 if self.cuda else 24

    def model(self, attention: str = "auto", *, longest: int = 4096) -> ModelConfig:
        """Return the model; the CPU has one attention."""
        if not self.cuda:
            return replace(TINY, max_seq_len=min(longest, TINY.max_seq_len))
        return replace(
            QWEN3_0_6B, attention=attention, max_seq_len=longest, hf_path=self.hf_path or None
        )

    def trainer(self, dtype: str = "bfloat16", **fields: object) -> TrainerConfig:
        """Return the config of a trainer of one rank."""
        return TrainerConfig(
            training=TrainingConfig(mixed_precision_param=dtype),
            optimizer=default_adamw(lr=1e-4, weight_decay=0.0),
            micro_batch_size=8,
            **fields,
        )

    def generator(self, dtype: str = "bfloat16", **fields: object) -> GeneratorConfig:
        """Return the config of a generator that leaves memory to the trainer."""
        return GeneratorConfig(dtype=dtype, gpu_memory_utilization=0.4, kv_cache_gib=0.05, **fields)

    def session(self, **fields: object) -> SessionConfig:
        """Return the config of a session that checks every push."""
        given = {"model": self.model(), "weights": WeightPushConfig(digests=True)}
        return SessionConfig(**{**given, **fields})


def gpu_index() -> str:
    """Return nvidia-smi's name of the first GPU that this process sees."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
