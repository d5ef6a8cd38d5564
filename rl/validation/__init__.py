"""Checks of a config, made before any process starts."""

import re
from collections.abc import Callable
from typing import Any

from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC

from rl.algorithms import losses
from rl.algorithms.ratio_losses import SAPOLoss
from rl.config import (
    BestConfig,
    DatasetRunConfig,
    PreferenceConfig,
    RewardModelConfig,
    RLConfig,
    RunConfig,
    ServeConfig,
    SFTConfig,
)
from rl.errors import ConfigError, require, require_value
from rl.host.listening import address_of
from rl.model.shape import family_of, shape_of
from rl.training.trainer_config import HEAD, adaptable_layers
from rl.validation.engines import validate_generator, validate_optimizers
from rl.validation.folders import RESERVED, find_models, validate_folders
from rl.validation.layouts import (
    validate_bank,
    validate_devices,
    validate_generator_layout,
    validate_layouts,
    validate_lengths,
    validate_nodes,
)
from rl.validation.rl_runs import ROLLOUT_CHECKS
from rl.validation.values import check, validate_numbers, validate_types, validate_unused, values

SLURM_TIMES = (
    "empty, or minutes, minutes:seconds, hours:minutes:seconds or days-hours[:minutes[:seconds]]"
)
NEEDS_ROLLOUTS = (
    *(losses.ClippedLoss.Config, losses.CISPOLoss.Config, losses.DPPOLoss.Config),
    *(losses.ImportanceSamplingLoss.Config, losses.DistillationLoss.Config, SAPOLoss.Config),
)


def validate(config: RunConfig) -> None:
    """Raise ConfigError, naming field, value and what is allowed, if the run cannot work."""
    for validator in checks(config):
        validator(config)


def checks(config: RunConfig) -> list[Callable[[Any], None]]:
    """Return the parts of ``validate``, in order. All but the first three rely on those three."""
    return [rule for kind in reversed(type(config).__mro__) for rule in CHECKS.get(kind, ())]


def _validate_checkpoints(config: RunConfig) -> None:
    """Check the folder of checkpoints, and when the best one is looked for."""
    folder = config.trainer.checkpoint.folder
    taken = (*RESERVED, *(name for name in config.models() if name not in (*RESERVED, "trainer")))
    holds = bool(re.fullmatch(r"[\w-]+", folder)) and folder not in taken
    rule = f"a name of letters, digits, _ and -, and none of {', '.join(taken)}"
    check(config, "trainer.checkpoint.folder", holds, rule)
    best = config.best
    if not best.metric:
        for name in ("mode", "keep", "patience", "min_delta"):
            default = getattr(BestConfig(), name)
            rule = f"{default!r} unless best.metric is set"
            check(config, f"best.{name}", getattr(best, name) == default, rule)
        return
    holds = config.trainer.checkpoint.enable
    check(config, "best.metric", holds, "empty unless trainer.checkpoint.enable is True")
    holds = not isinstance(config, RLConfig) or config.rollout.pipeline == "deterministic"
    rule = "empty unless rollout.pipeline is 'deterministic'"
    fix = "an asynchronous run evaluates the weights of several steps at once"
    check(config, "best.metric", holds, rule, fix)
    rule = "0 unless best.patience is above 0"
    check(config, "best.min_delta", best.patience > 0 or best.min_delta == 0, rule)


def _validate_training_modes(config: RunConfig) -> None:
    trainer = config.trainer
    compiles = trainer.compile.enable
    float8 = trainer.float8
    if float8 is not None:
        field = "trainer.float8.emulate"
        rule = f"True with hardware.device={config.hardware.device!r}"
        fix = "float8 needs NVIDIA SM89, AMD gfx942, or a later GPU"
        check(config, field, float8.emulate or config.hardware.computes_float8, rule, fix)
        rule = "False with trainer.compile.enable=True"
        check(config, field, not (float8.emulate and compiles), rule)
        holds = not float8.emulate or float8.recipe_name == "rowwise"
        rule = "'rowwise' with trainer.float8.emulate=True, which computes by no recipe"
        check(config, "trainer.float8.recipe_name", holds, rule)
    budget = isinstance(trainer.activation_checkpoint, MemoryBudgetAC.Config)
    rule = "True with trainer.activation_checkpoint=memory-budget"
    fix = "or choose selective, full or none"
    check(config, "trainer.compile.enable", compiles or not budget, rule, fix)
    known = trainer.compile.backend in ("inductor", "aot_eager")
    rule = "'inductor' or 'aot_eager', which torchtitan's attention can be compiled by"
    check(config, "trainer.compile.backend", known, rule)


def _validate_lora(config: RunConfig) -> None:
    lora = config.trainer.lora
    if lora is None:
        return
    tied = shape_of(config.model).tie_embeddings
    allowed = [*adaptable_layers(config.model), *([] if tied else [HEAD])]
    chosen = lora.target_modules
    holds = chosen is None or (bool(chosen) and set(chosen) <= set(allowed))
    rule = f"None, for all, or some of {allowed} with model.fuse_qkv={config.model.fuse_qkv}"
    check(config, "trainer.lora.target_modules", holds, rule)
    is_reward_model = config.models()["trainer"].head == "values"
    for other, clashes in (
        ("a reward model, whose value head would be frozen", is_reward_model),
        ("trainer.float8", config.trainer.float8 is not None),
    ):
        require_value(not clashes, "trainer.lora", type(lora), f"None with {other}")


def _validate_balance(config: RunConfig) -> None:
    has_experts = shape_of(config.model).num_experts > 0
    coefficient = config.trainer.balance.loss_coefficient
    rule = "0 for a model without experts"
    check(config, "trainer.balance.loss_coefficient", has_experts or coefficient == 0, rule)
    has_bias = config.model.expert_bias
    check(config, "model.expert_bias", has_experts or not has_bias, "False without experts")
    for needs, holds in (
        ("model.expert_bias=True", has_bias),
        ("trainer.training.dtype='float32'", config.trainer.training.dtype == "float32"),
        ("trainer.lora=None, which trains the base", config.trainer.lora is None),
    ):
        holds = holds or config.trainer.balance.bias_rate == 0
        check(config, "trainer.balance.bias_rate", holds, f"0 unless {needs}")


def _validate_schedules(config: RunConfig) -> None:
    """Check that no schedule ends before the run: torchtitan's would go on below 0."""
    steps = config.optimizer_steps
    if steps is None:
        return
    for value in values(config):
        if type(value.content) is LRSchedulersContainer.Config:
            total = value.content.total_steps
            rule = f"None or at least the run's {steps} optimizer steps"
            name = f"{value.name}.total_steps"
            require_value(total is None or total >= steps, name, total, rule)


def _validate_slurm(config: RunConfig) -> None:
    slurm = config.slurm
    try:
        limit = slurm.time_s
    except ValueError:
        raise ConfigError(field="slurm.time", value=slurm.time, allowed=SLURM_TIMES) from None
    rule = f"less than slurm.time={slurm.time!r}, which is {limit} s"
    holds = limit is None or limit > slurm.warn_s
    check(config, "slurm.warn_s", holds, rule, "each attempt would leave at once")


def _validate_watchdog_and_sinks(config: RunConfig) -> None:
    low = config.watchdog.entropy_min
    high = config.watchdog.entropy_max
    holds = high == 0 or high > low
    check(config, "watchdog.entropy_max", holds, f"0 or above entropy_min={low}")
    for sink in config.sinks.all():
        sink.check()
    if config.sinks.prometheus:
        address_of(config.sinks.prometheus, "sinks.prometheus")


def _validate_profile(config: RunConfig) -> None:
    profile = config.profile
    last = max(profile.steps, default=0)
    rule = f"at most steps={config.steps}"
    check(config, "profile.steps", last <= config.steps or config.optimizer_steps is None, rule)
    meshes = {name: role.trainer.ranks for name, role in config.models().items()}
    if (sampling := config.sampling_run()) is not None:
        numbers = range(sampling.generator.replicas)
        degree = sampling.generator.tensor_parallel_degree
        meshes |= {f"generator-{number}": degree for number in numbers}
    known = [f"{name}[{rank}]" for name, ranks in meshes.items() for rank in range(ranks)]
    holds = profile.ranks == type(profile)().ranks or {*profile.ranks} <= {*known}
    check(config, "profile.ranks", holds, f"ranks of the run, of which the first is {known[0]!r}")


def _validate_examples(config: SFTConfig | PreferenceConfig) -> None:
    rule = "the folder of the model and its tokenizer"
    check(config, "model.hf_path", config.model.hf_path is not None, rule)


def _validate_supervision(config: SFTConfig) -> None:
    rule = "a loss of log-probs and entropy, such as CrossEntropyLoss.Config"
    fix = "the loss needs advantages or a teacher"
    holds = not isinstance(config.loss, NEEDS_ROLLOUTS)
    require_value(holds, "loss", type(config.loss), rule, fix)
    fix = "the run has no reference policy"
    check(config, "loss.kl_coef", config.loss.kl_coef == 0, "0", fix)
    sampling = config.sampling_run()
    if sampling is None:
        return
    rule = "above 0; or set evaluation to None"
    check(config, "evaluation.prompts", sampling.evaluation.prompts > 0, rule)
    rule = "'none' or 'all': the trainer is the only model"
    check(config, "evaluation.colocate", sampling.colocate != "models", rule)
    try:
        validate(sampling)
    except ConfigError as error:
        raise error.inside("evaluation") from None


def _validate_preferences(config: PreferenceConfig) -> None:
    rule = "at least 2 with KTOLoss, whose baseline compares answers of a step"
    holds = config.examples_per_step > 1 or not config.loss.build().is_unpaired
    check(config, "examples_per_step", holds, rule)


def _validate_reward_model(config: RewardModelConfig) -> None:
    rule = "a loss of values, such as BradleyTerryLoss.Config"
    fix = "the loss is one of log-probs; train a policy with a PreferenceConfig"
    require_value(config.loss.build().head == "values", "loss", type(config.loss), rule, fix)
    family = family_of(shape_of(config.model))
    fix = f"transformers has no {family.reward_class}; train a model of another family"
    require(family.has_reward_class, f"a {family.model_type} cannot be a reward model", fix=fix)


def _validate_serving(config: ServeConfig) -> None:
    rule = "the config of adapters, such as LoRAConverter.Config(rank=32)"
    check(config, "trainer.lora", config.trainer.lora is not None, rule, "clients train adapters")
    distinct = len({*config.names}) == len(config.names) and all(config.names)
    check(config, "names", distinct, "different names")
    check(config, "colocate", config.colocate != "models", "'none' or 'all'")
    if (bank := config.session().adapters) is not None:
        validate_bank(config, bank)


CHECKS: dict[type, list[Callable[[Any], None]]] = {
    RunConfig: [
        *(validate_types, validate_numbers, find_models, validate_unused, validate_folders),
        *(validate_layouts, _validate_checkpoints, _validate_training_modes),
        *(validate_optimizers, _validate_schedules, _validate_lora, _validate_balance),
        *(_validate_slurm, _validate_watchdog_and_sinks, _validate_profile),
    ],
    DatasetRunConfig: [validate_nodes, validate_devices, validate_lengths, _validate_examples],
    SFTConfig: [_validate_supervision],
    PreferenceConfig: [_validate_preferences],
    RewardModelConfig: [_validate_reward_model],
    ServeConfig: [
        *(validate_nodes, validate_devices, validate_generator, validate_generator_layout),
        _validate_serving,
    ],
    RLConfig: ROLLOUT_CHECKS,
}
"""Checks by kind of config. Those of its base classes come first."""
