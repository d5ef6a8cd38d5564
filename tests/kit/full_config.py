"""A config that has every section and most kinds of parts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan.components.lora import LoRAConverter
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC

from rl.algorithms.advantages import GAE
from rl.algorithms.corrections import MaskedIS, StalenessDecay, TruncatedIS
from rl.cli.arguments import find_config
from rl.config import RLConfig, RoleConfig
from rl.validation.values import value_of


def full_config(checkpoint: Path) -> RLConfig:
    """Return the quickstart with critic, reference, roles and corrections; valid as it is."""
    config = find_config("quickstart")()
    algorithm = config.algorithm
    algorithm.advantage = GAE.Config()
    algorithm.loss.kl_coef = 0.1
    corrections = (TruncatedIS.Config(), MaskedIS.Config(), StalenessDecay.Config())
    algorithm.corrections = corrections
    judge = RoleConfig(model=replace(config.model), checkpoint=str(checkpoint), head="values")
    config.roles["judge"] = judge
    config.trainer.micro_batch_tokens = 64
    for optimizer in (config.trainer.optimizer, config.critic.optimizer):
        optimizer.param_groups[0].optimizer_kwargs["betas"] = [0.9, 0.95]
    return config


def with_converters(config: RLConfig) -> RLConfig:
    """Add the parts of the trainer that no run can have together."""
    config.trainer.lora = LoRAConverter.Config()
    config.trainer.float8 = Float8LinearConverter.Config()
    config.trainer.activation_checkpoint = MemoryBudgetAC.Config()
    return config


def put(config: RLConfig, name: str, content: Any) -> RLConfig:
    """Set field ``name`` of ``config`` to ``content``, and return ``config``."""
    *path, last = name.split(".")
    holder: Any = config
    for key in path:
        holder = value_of(holder, key)
    if isinstance(holder, (list, dict)):
        holder[last if isinstance(holder, dict) else int(last)] = content
    else:
        setattr(holder, last, content)
    return config
