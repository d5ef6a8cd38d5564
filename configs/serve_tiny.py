"""A tiny model for clients of the Tinker API, on a laptop's CPU."""

from torchtitan.components.lora import LoRAConverter

from rl.config import ServeConfig
from rl.generation.generator_config import GeneratorConfig
from rl.model.shape import ModelConfig
from rl.training.trainer_config import HEAD, TrainerConfig


def serve_tiny() -> ServeConfig:
    """A Qwen3 of 200 thousand parameters, random or of --model.hf_path DIR, for clients of the
    Tinker API.
    """
    return ServeConfig(
        names=(
            "Qwen/Qwen3-8B",
            "Qwen/Qwen3-8B-Base",
            "Qwen/Qwen3.5-9B",
            "Qwen/Qwen3.5-9B-Base",
            "Qwen/Qwen3-4B-Instruct-2507",
        ),
        model=ModelConfig(
            vocab_size=264,
            dim=64,
            n_layers=2,
            n_heads=4,
            n_kv_heads=2,
            head_dim=32,
            hidden_dim=192,
            max_seq_len=4096,
            tie_embeddings=False,
        ),
        trainer=TrainerConfig(
            lora=LoRAConverter.Config(
                rank=32, target_modules=["wqkv", "wo", "w1", "w2", "w3", HEAD]
            ),
            micro_batch_tokens=4096,
        ),
        generator=GeneratorConfig(kv_cache_gib=0.25),
        max_loras=4,
    )
