"""What a run cannot work with, said before any process starts."""

from dataclasses import fields
from pathlib import Path
from typing import get_args

from torchtitan.config import ParallelismConfig
from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC
from torchtitan.tools.utils import has_cuda_capability, has_rocm_capability

from rl.config import Action, RolloutConfig, RunConfig, WatchdogConfig
from rl.errors import ConfigError
from rl.generation.config import MIN_TEMPERATURE, GeneratorConfig
from rl.model.shape import ModelConfig, ModelShape, shape_of
from rl.model.tp_plan import check_divides, check_generator
from rl.platform import device_count, device_type
from rl.training.attention import attention_config
from rl.training.config import TrainerConfig, adaptable_layers, ranks_of

MODEL_SIZES = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "max_seq_len")
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)


def validate(config: RunConfig) -> None:
    """Raise ConfigError, naming field, value and what is allowed, if the run cannot work."""
    _validate_numbers(config)
    for name, parallelism, model in _layouts(config):
        _validate_mesh(name, parallelism)
        _validate_context_parallel(name, parallelism, model.attention)
    _validate_training_modes(config.trainer)
    _validate_resume(config)
    _validate_push(config)
    _validate_pipeline(config.rollout)
    _validate_algorithm(config)
    _validate_roles(config)
    _validate_watchdog(config.watchdog)
    shape = shape_of(config.model)
    _validate_lora(config, shape)
    for name, parallelism, model in _layouts(config):
        attention_config(model.attention)
        _validate_experts(f"{name}.expert_parallel_degree", parallelism, shape_of(model))
        check_divides(f"{name}.tensor_parallel_degree", parallelism.tensor_parallel_degree, shape_of(model))
    _validate_generator(config.generator, shape)
    _require(
        shape.n_heads % shape.n_kv_heads == 0,
        f"model.n_kv_heads is {shape.n_kv_heads}; it must divide model.n_heads={shape.n_heads}",
    )
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    _require(
        longest <= shape.max_seq_len,
        f"data.max_prompt_tokens={config.data.max_prompt_tokens} + rollout.max_tokens={config.rollout.max_tokens} "
        f"is {longest}; it must be at most model.max_seq_len={shape.max_seq_len}",
    )
    budget = config.trainer.micro_batch_tokens
    _require(
        budget is None or budget >= longest,
        f"trainer.micro_batch_tokens is {budget}; it must be at least {longest}, the longest prompt and completion",
    )
    if device_type() == "cpu":
        _require(
            shape.head_dim in CPU_HEAD_DIMS,
            f"model.head_dim is {shape.head_dim}; vLLM's CPU attention allows {list(CPU_HEAD_DIMS)}",
        )
        mode = config.trainer.checkpoint.async_mode
        _require(
            mode != "async_with_pinned_mem",
            f"trainer.checkpoint.async_mode is {mode!r}, which needs CUDA; this host allows 'disabled' and 'async'",
        )
    else:
        models = [ranks_of(parallelism) for _, parallelism, _ in _layouts(config)]
        ranks = max(config.generator.tensor_parallel_degree, *models)
        _require(
            ranks <= device_count(),
            f"the config needs {ranks} GPUs on this host, which has {device_count()}; lower a parallelism degree",
        )


def _validate_numbers(config: RunConfig) -> None:
    rollout = config.rollout
    at_least: dict[str, tuple[float, float]] = {
        "steps": (config.steps, 1),
        "rollout.prompts_per_step": (rollout.prompts_per_step, 1),
        "rollout.samples_per_prompt": (rollout.samples_per_prompt, 2),
        "rollout.max_tokens": (rollout.max_tokens, 1),
        "rollout.temperature": (rollout.temperature, MIN_TEMPERATURE),
        "rollout.recorded_per_step": (rollout.recorded_per_step, 0),
        "rollout.max_staleness": (rollout.max_staleness, 0),
        "rollout.parts_per_step": (rollout.parts_per_step, 1),
        "rollout.max_replacements": (rollout.max_replacements, 0),
        "rollout.reward_workers": (rollout.reward_workers, 0),
        "rollout.max_lost": (rollout.max_lost, 0),
        "generator.replicas": (config.generator.replicas, 1),
        "max_restarts": (config.max_restarts, 0),
        "evaluation.every": (config.evaluation.every, 0),
        "deadlines.heartbeat": (config.deadlines.heartbeat, 0),
        "model.num_experts": (config.model.num_experts, 0),
        "algorithm.update_epochs": (config.algorithm.update_epochs, 1),
        "algorithm.mini_batch": (config.algorithm.mini_batch, 0),
        "algorithm.overlong_buffer": (config.algorithm.overlong_buffer, 0),
        "algorithm.loss.kl_coef": (config.algorithm.loss.kl_coef, 0),
        "algorithm.reward_kl_coef": (config.algorithm.reward_kl_coef, 0),
        "reference.refresh_every": (config.reference.refresh_every, 0),
        "trainer.micro_batch_size": (config.trainer.micro_batch_size, 1),
        "trainer.logits_mib": (config.trainer.logits_mib, 1),
        "trainer.max_skipped_steps": (config.trainer.max_skipped_steps, 0),
        "evaluation.prompts": (config.evaluation.prompts, 0),
        "evaluation.samples": (config.evaluation.samples, 0),
        **{f"watchdog.{name}": (getattr(config.watchdog, name), 1) for name in ("flat_steps", "starving_steps")},
        **{
            f"watchdog.{name}": (getattr(config.watchdog, name), 0)
            for name in ("entropy_min", "entropy_max", "drift_max")
        },
        **{f"model.{name}": (getattr(config.model, name), 1) for name in MODEL_SIZES},
    }
    for name, (value, least) in at_least.items():
        _require(value >= least, f"{name} is {value}; it must be at least {least}")
    for name, value, allowed in (("top_p", rollout.top_p, 1.0), ("top_k", rollout.top_k, 0)):
        _require(
            value == allowed,
            f"rollout.{name} is {value}; it must be {allowed}: the trainer knows no log-probs of a cut distribution",
        )


def _layouts(config: RunConfig) -> list[tuple[str, ParallelismConfig, ModelConfig]]:
    """Of each model that the run has, with the field's name."""
    layouts = [("trainer.parallelism", config.trainer.parallelism, config.model)]
    if config.algorithm.kl_coef:
        layouts.append(("reference.parallelism", config.reference.parallelism, config.model))
    if config.algorithm.advantage.needs_values:
        layouts.append(("critic.parallelism", config.critic.parallelism, config.model))
    roles = config.roles.items()
    return [*layouts, *((f"roles.{name}.parallelism", role.parallelism, role.model) for name, role in roles)]


def _validate_mesh(field_name: str, parallelism: ParallelismConfig) -> None:
    for name in ("data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel"):
        degree = getattr(parallelism, f"{name}_degree")
        _require(
            degree >= 1,
            f"{field_name}.{name}_degree is {degree}; it must be at least 1; the product of all is the number of ranks",
        )
    stages = parallelism.pipeline_parallel_degree
    _require(
        stages == 1,
        f"{field_name}.pipeline_parallel_degree is {stages}; it must be 1: cut the model by "
        "data_parallel_shard_degree or tensor_parallel_degree instead",
    )
    _require(
        parallelism.spmd_backend == "partial_dtensor",
        f"{field_name}.spmd_backend is {parallelism.spmd_backend!r}; with this torch only 'partial_dtensor' works",
    )


def _validate_context_parallel(field_name: str, parallelism: ParallelismConfig, attention: str) -> None:
    if parallelism.context_parallel_degree == 1:
        return
    _require(
        attention != "varlen",
        f"model.attention is 'varlen', which cannot run under {field_name}.context_parallel_degree="
        f"{parallelism.context_parallel_degree}; 'auto' and 'flex' can",
    )
    balancer = parallelism.context_parallel_load_balancer
    _require(
        balancer != "ptrr" or device_type() == "cuda",
        f"{field_name}.context_parallel_load_balancer is {balancer!r}, which needs flex attention on CUDA; "
        "this host allows 'headtail' and None",
    )


def _validate_training_modes(trainer: TrainerConfig) -> None:
    if trainer.float8 is not None:
        emulate = trainer.float8.emulate
        _require(
            emulate or has_cuda_capability(8, 9) or has_rocm_capability(9, 4),
            "trainer.float8.emulate is False; it must be True on this host, which has no GPU that computes in float8 "
            "(NVIDIA SM89 or AMD gfx942, or later)",
        )
        _require(
            not (emulate and trainer.compiles_model),
            "trainer.float8.emulate is True; with trainer.compile.enable=True it must be False: "
            "emulated float8 cannot be compiled",
        )
    _require(
        trainer.compiles_model or not isinstance(trainer.activation_checkpoint, MemoryBudgetAC.Config),
        "trainer.activation_checkpoint is memory-budget, which only a compiled model can keep: "
        "set trainer.compile.enable to True, or choose selective, full or none",
    )


def _validate_lora(config: RunConfig, shape: ModelShape) -> None:
    lora = config.trainer.lora
    if lora is None:
        return
    _require(lora.rank >= 1, f"trainer.lora.rank is {lora.rank}; it must be at least 1")
    _require(lora.alpha > 0, f"trainer.lora.alpha is {lora.alpha}; it must be above 0")
    allowed = adaptable_layers(config.model)
    _require(
        lora.target_modules is None or (bool(lora.target_modules) and set(lora.target_modules) <= set(allowed)),
        f"trainer.lora.target_modules is {lora.target_modules}; it must be None, for all, or some of {allowed} "
        f"with model.fuse_qkv={config.model.fuse_qkv}",
    )
    _require(
        shape.num_experts == 0,
        f"trainer.lora is on; it must be none with the model's {shape.num_experts} experts, which have no adapters",
    )
    _require(
        config.trainer.float8 is None,
        "trainer.lora is on; it must be none with trainer.float8: the two are not supported together",
    )


def _validate_experts(field_name: str, parallelism: ParallelismConfig, shape: ModelShape) -> None:
    degree = parallelism.expert_parallel_degree
    if shape.num_experts == 0:
        _require(degree == 1, f"{field_name} is {degree}; it must be 1 where model.num_experts is 0")
        return
    _require(
        1 <= shape.experts_per_token <= shape.num_experts,
        f"model.experts_per_token is {shape.experts_per_token}; "
        f"it must be between 1 and model.num_experts={shape.num_experts}",
    )
    _require(shape.moe_hidden_dim >= 1, f"model.moe_hidden_dim is {shape.moe_hidden_dim}; it must be at least 1")
    shards = parallelism.data_parallel_shard_degree * parallelism.context_parallel_degree
    ranks = shards * parallelism.tensor_parallel_degree
    allowed = [d for d in range(1, shape.num_experts + 1) if shape.num_experts % d == 0 and ranks % d == 0]
    _require(
        degree in allowed,
        f"{field_name} is {degree}; it must divide model.num_experts={shape.num_experts} and "
        f"data_parallel_shard*context_parallel*tensor_parallel={ranks}: allowed are {allowed}",
    )
    _require(
        degree == 1 or parallelism.tensor_parallel_degree == 1 or parallelism.enable_sequence_parallel,
        f"{field_name.replace('expert_parallel_degree', 'enable_sequence_parallel')} is False; "
        "it must be True where experts and tensors are parallel both",
    )
    width, replicas = shape.moe_hidden_dim, parallelism.data_parallel_replicate_degree
    if degree > 1:
        shards, holders = ranks // degree, ranks
    else:
        width, holders = width // parallelism.tensor_parallel_degree, shards * replicas
    _require(
        holders <= shape.num_experts or (shape.dim % shards == 0 and width % shards == 0),
        f"model.moe_hidden_dim is {shape.moe_hidden_dim} and model.dim is {shape.dim}; with more ranks ({holders}) "
        f"than experts ({shape.num_experts}) FSDP cuts both, so the {shards} shards must divide them",
    )


def _validate_generator(generator: GeneratorConfig, shape: ModelShape) -> None:
    check_generator(generator.tensor_parallel_degree, shape, expert_parallel=generator.expert_parallel)
    _require(
        generator.enforce_eager or not generator.expert_parallel,
        "generator.enforce_eager is False; it must be True with generator.expert_parallel=True: "
        "how many tokens a rank's experts get is not known when a model is compiled",
    )


def _validate_resume(config: RunConfig) -> None:
    step = config.trainer.checkpoint.load_step
    _require(
        step == -1,
        f"trainer.checkpoint.load_step is {step}; it must be -1: --resume goes on from the newest, losing no work",
    )


def _validate_push(config: RunConfig) -> None:
    push = config.weights
    _require(
        push.transport != "cuda_ipc" or device_type() == "cuda",
        "weights.transport is 'cuda_ipc', which needs CUDA; this host allows 'auto', 'shared_memory', 'rdma' and "
        "'torchstore'",
    )
    _require(
        not push.delta or push.transport in ("auto", "rdma", "torchstore"),
        f"weights.delta is True; with weights.transport={push.transport!r} it must be False: a copy of everything is "
        "as quick there",
    )
    tolerance = push.canary_tolerance
    _require(
        tolerance is None or tolerance >= 0,
        f"weights.canary_tolerance is {tolerance}; it must be None, 0 for no canary, or above",
    )


def _validate_pipeline(rollout: RolloutConfig) -> None:
    parts, field_name = rollout.parts_per_step, "rollout.parts_per_step"
    _require(
        parts == 1 or rollout.pipeline == "asynchronous",
        f"{field_name} is {parts}; it must be 1 unless rollout.pipeline is 'asynchronous': the order in which groups "
        "finish would change the numbers",
    )
    _require(
        parts <= rollout.prompts_per_step,
        f"{field_name} is {parts}; it must be at most rollout.prompts_per_step={rollout.prompts_per_step}",
    )
    _require(rollout.max_lost <= 1, f"rollout.max_lost is {rollout.max_lost}; it is a share, at most 1")


def _validate_algorithm(config: RunConfig) -> None:
    algorithm, prompts = config.algorithm, config.rollout.prompts_per_step
    _require(
        algorithm.mini_batch == 0 or prompts % algorithm.mini_batch == 0,
        f"algorithm.mini_batch is {algorithm.mini_batch}; it must divide rollout.prompts_per_step={prompts}",
    )
    whole = config.updates_per_step > 1 or not algorithm.advantage.by_group
    parts, field_name = config.rollout.parts_per_step, "rollout.parts_per_step"
    _require(
        parts == 1 or not whole,
        f"{field_name} is {parts}; it must be 1 where a step has several updates or its advantages are compared over "
        f"all groups: the whole batch must be there",
    )
    _require(
        not (algorithm.loss.kl_coef and algorithm.reward_kl_coef),
        f"algorithm.reward_kl_coef is {algorithm.reward_kl_coef}; it must be 0 with algorithm.loss.kl_coef="
        f"{algorithm.loss.kl_coef}: the penalty stands in the loss or in the reward",
    )
    _require(
        not algorithm.loss.kl_coef or algorithm.loss.kl_estimator != "k1",
        "algorithm.loss.kl_estimator is 'k1', whose gradient is 0 on average; in a loss it must be 'k2' or 'k3'; with "
        "algorithm.reward_kl_coef it can be any",
    )
    dual = getattr(algorithm.loss, "dual_clip", 0.0)
    _require(dual == 0 or dual > 1, f"algorithm.loss.dual_clip is {dual}; it must be 0, for none, or above 1")
    _require(
        algorithm.adaptive_kl.target == 0 or algorithm.kl_coef > 0,
        f"algorithm.adaptive_kl.target is {algorithm.adaptive_kl.target}; it must be 0 where no "
        "algorithm.loss.kl_coef or algorithm.reward_kl_coef above 0 is there to steer",
    )
    alone = config.colocate != "all" or (config.rollout.max_staleness == 0 and config.generator.enforce_eager)
    _require(
        alone,
        "colocate is 'all'; it must be 'none' or 'models' unless rollout.max_staleness is 0 (nothing is generated "
        "while the trainer has the devices) and generator.enforce_eager is True (compiled code keeps addresses)",
    )
    longest = config.rollout.max_tokens
    _require(
        algorithm.overlong_buffer <= longest,
        f"algorithm.overlong_buffer is {algorithm.overlong_buffer}; it must be at most rollout.max_tokens={longest}",
    )


def _validate_roles(config: RunConfig) -> None:
    words, longest = shape_of(config.model).vocab_size, config.data.max_prompt_tokens + config.rollout.max_tokens
    for name, role in config.roles.items():
        taken = ("policy", "trainer", "reference", "critic", "reward", "generator", "checkpoints", "logs", "export")
        _require(
            name.isidentifier() and name not in taken,
            f"roles: {name!r} cannot be the name of a role; it must be an identifier other than {list(taken)}",
        )
        shape = shape_of(role.model)
        _require(
            shape.vocab_size == words,
            f"roles.{name}.model.vocab_size is {shape.vocab_size}; it must be that of the policy, {words}",
        )
        _require(
            shape.max_seq_len >= longest,
            f"roles.{name}.model.max_seq_len is {shape.max_seq_len}; it must be at least {longest}, the longest prompt "
            "and completion",
        )
        _require(
            bool(role.checkpoint or (role.model.hf_path and role.head == "logprobs")),
            f"roles.{name}.checkpoint is not set; it must say where the weights are, or model.hf_path where "
            f"roles.{name}.head is 'logprobs'",
        )
        _require(
            role.checkpoint is None or Path(role.checkpoint, ".metadata").is_file(),
            f"roles.{name}.checkpoint is {role.checkpoint!r}, where no complete checkpoint is; name the folder of one, "
            "as RUN/checkpoints/step-100",
        )
        _require(
            role.reward_weight == 0 or role.head == "values",
            f"roles.{name}.reward_weight is {role.reward_weight}; it must be 0 unless roles.{name}.head is 'values'",
        )


def _validate_watchdog(watchdog: WatchdogConfig) -> None:
    for field in fields(watchdog):
        value = getattr(watchdog, field.name)
        if field.type is Action:
            _require(value in get_args(Action), f"watchdog.{field.name} is {value!r}; allowed are {get_args(Action)}")
    _require(watchdog.stalled_s > 0, f"watchdog.stalled_s is {watchdog.stalled_s}; it must be above 0")
    share = watchdog.starving_share
    _require(0 < share < 1, f"watchdog.starving_share is {share}; it must be above 0 and below 1")
    low, high = watchdog.entropy_min, watchdog.entropy_max
    _require(high == 0 or high > low, f"watchdog.entropy_max is {high}; it must be 0 or above entropy_min={low}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
