"""Names that no field has. Those of other trainers are refused with Tiller's name, misspelt ones
with the nearest.

TRL's names are those of its GRPOConfig, SFTConfig and DPOConfig, and OpenRLHF's those of its
options; verl's and prime-rl's are the paths of their config files, and torchtitan's those of its
trainer's.
"""

import dataclasses
import re
from functools import cached_property
from typing import Any, get_args, get_type_hints

from rl.errors import nearest

LR = "trainer.optimizer.param_groups.0.optimizer_kwargs.lr"
CONTEXT = "trainer.parallelism.context_parallel_degree"
OTHER_NAMES = {
    # TRL
    "learning_rate": LR,
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "num_generations": "rollout.samples_per_prompt",
    "max_completion_length": "rollout.max_tokens",
    "per_device_train_batch_size": "trainer.micro_batch_size",
    "num_iterations": "algorithm.update_epochs",
    "epsilon": "algorithm.loss.clip_low",
    "epsilon_high": "algorithm.loss.clip_high",
    "loss_type": "algorithm.loss.reduction",
    "scale_rewards": "algorithm.advantage.normalize_std",
    "max_grad_norm": "trainer.training.max_norm",
    "save_steps": "trainer.checkpoint.interval",
    "save_total_limit": "trainer.checkpoint.keep_latest_k",
    "eval_steps": "evaluation.every",
    "eval_on_start": "evaluation.at_start",
    "resume_from_checkpoint": "resume",
    "model_name_or_path": "model.hf_path",
    "max_length": "model.max_seq_len",
    "packing": "trainer.packing",
    "mask_truncated_completions": "algorithm.mask_truncated",
    "metric_for_best_model": "best.metric",
    "early_stopping_patience": "best.patience",
    "run_name": "sinks.name",
    # verl
    "data.train_files": "task.path",
    "data.train_batch_size": "rollout.prompts_per_step",
    "data.max_response_length": "rollout.max_tokens",
    "actor_rollout_ref.model.path": "model.hf_path",
    "actor_rollout_ref.actor.optim.lr": LR,
    "actor_rollout_ref.actor.ppo_mini_batch_size": "algorithm.prompts_per_minibatch",
    "actor_rollout_ref.actor.ppo_epochs": "algorithm.update_epochs",
    "actor_rollout_ref.actor.clip_ratio_low": "algorithm.loss.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.loss.clip_high",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.loss.entropy_coef",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.loss.kl_coef",
    "actor_rollout_ref.actor.loss_agg_mode": "algorithm.loss.reduction",
    "actor_rollout_ref.rollout.n": "rollout.samples_per_prompt",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "generator.tensor_parallel_degree",
    "algorithm.adv_estimator": "algorithm",
    "algorithm.kl_ctrl.kl_coef": "algorithm.reward_kl_coef",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "trainer.offload_optimizer",
    "trainer.total_training_steps": "steps",
    "trainer.save_freq": "trainer.checkpoint.interval",
    "trainer.test_freq": "evaluation.every",
    "trainer.val_before_train": "evaluation.at_start",
    "trainer.project_name": "sinks.project",
    "algorithm.filter_groups.enable": "rollout.max_resampled_groups",
    "reward_model.overlong_buffer.len": "algorithm.overlong_buffer",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": CONTEXT,
    "trainer.experiment_name": "sinks.name",
    "data.apply_chat_template_kwargs": "task.enable_thinking",
    # torchtitan
    "profiler.enable_profiling": "profile",
    "profiler.enable_memory_snapshot": "profile.memory",
    # prime-rl
    "seq_len": "model.max_seq_len",
    "max_async_level": "rollout.max_staleness",
    "orchestrator.rollouts_per_example": "rollout.samples_per_prompt",
    "orchestrator.sampling.max_tokens": "rollout.max_tokens",
    "orchestrator.sampling.temperature": "rollout.temperature",
    "trainer.optim.lr": LR,
    "trainer.model.ac": "trainer.activation_checkpoint",
    "inference.parallel.tp": "generator.tensor_parallel_degree",
    "inference.parallel.dp": "generator.replicas",
    "trainer.model.cp": CONTEXT,
    "trainer.model.optim_cpu_offload": "trainer.offload_optimizer",
    "wandb.project": "sinks.project",
    "wandb.name": "sinks.name",
    "heartbeat.url": "sinks.webhook",
    # OpenRLHF
    "rollout_batch_size": "rollout.prompts_per_step",
    "n_samples_per_prompt": "rollout.samples_per_prompt",
    "micro_train_batch_size": "trainer.micro_batch_size",
    "generate_max_len": "rollout.max_tokens",
    "prompt_max_len": "task.max_prompt_tokens",
    "actor_learning_rate": LR,
    "init_kl_coef": "algorithm.reward_kl_coef",
    "eps_clip": "algorithm.loss.clip_low",
    "dynamic_filtering": "rollout.max_resampled_groups",
    "overlong_buffer_len": "algorithm.overlong_buffer",
    "best_metric_key": "best.metric",
    "ring_attn_size": CONTEXT,
    "adam_offload": "trainer.offload_optimizer",
    "vllm_num_engines": "generator.replicas",
    "vllm_tensor_parallel_size": "generator.tensor_parallel_degree",
    "prompt_data": "task.path",
    "packing_samples": "trainer.packing",
    "wandb_project": "sinks.project",
    "wandb_run_name": "sinks.name",
    "use_wandb": "sinks.wandb",
    "use_tensorboard": "sinks.tensorboard",
}
"""Path of a field, from the root of a config, by its name in another trainer."""


def hint(message: str) -> str:
    """Return a clause for Python's ``message`` about an attribute or argument that has the name of
    another trainer; "" for other messages.
    """
    if not re.search(r"has no attribute|unexpected keyword argument", message):
        return ""
    news = [new for old, new in OTHER_NAMES.items() if message.endswith(f"'{old}'")]
    return f"; Tiller's name is {news[0]}" if news else ""


def refusal(kind: type, name: str) -> str:
    """Return why configs of ``kind`` have no attribute ``name``; empty if they may have it.

    Names that begin with ``_`` are free, for caches.
    """
    fields = {field.name for field in dataclasses.fields(kind)}
    declared = getattr(kind, name, None)
    if name in fields or name.startswith("_") or isinstance(declared, cached_property):
        return ""
    if hasattr(declared, "__set__"):  # a property
        return ""
    text = f"{kind.__qualname__} has no attribute {name!r}"
    near = nearest(name, fields) or f"its fields are {', '.join(sorted(fields))}"
    return text + (hint(text) or f"; {near.rstrip()}")


def refuse_unknown(kind: Any) -> None:
    """Let configs of ``kind``, of its subclasses, and of the kinds of its fields refuse unknown
    attributes and arguments, with or without ``slots``.
    """
    if dataclasses.is_dataclass(kind) and "__setattr__" not in vars(kind):
        kind.__setattr__ = _set  # type: ignore[method-assign, assignment]
        kind.__new__ = _new  # type: ignore[method-assign, assignment]
        for inner in get_type_hints(kind).values():
            refuse_unknown(inner)
    for argument in get_args(kind):
        refuse_unknown(argument)


def _new(kind: Any, *_: Any, **fields: Any) -> Any:
    for text in filter(None, (refusal(kind, name) for name in fields)):
        raise TypeError(text)
    return object.__new__(kind)


def _set(config: Any, name: str, value: Any) -> None:
    if text := refusal(type(config), name):
        raise AttributeError(text, name=name, obj=config)
    object.__setattr__(config, name, value)
