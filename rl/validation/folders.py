"""Checks of the folders that a run's models start from: headers against what the models need."""

import dataclasses
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl.config import RLConfig, RunConfig
from rl.config.frozen import read_config_file
from rl.errors import ConfigError, RunError, require_value
from rl.model.hub import Snapshot, is_name, locate
from rl.model.shape import ModelConfig, ModelShape, shape_of
from rl.training.hugging_face_files import check_finite, check_folder
from rl.training.safe_reading import check_checkpoint
from rl.types import Head
from rl.validation.values import value_of, values

COMPLETE = "the folder of a complete checkpoint, such as RUN/checkpoints/step-100"
OWN_FIELDS = ("max_seq_len", "dtype")
"""Fields of ModelShape in which a folder of initial weights may differ from the model."""


RESERVED = (
    *("critic", "export", "exports", "launch", "lock", "logs", "reference", "replicas"),
    *("rollouts", "tensorboard", "tokenizer", "wandb"),
)
"""Names in a run folder that Tiller uses."""


def models_of(config: RunConfig) -> dict[str, ModelConfig]:
    """Return the sections that name a model, by their names."""
    contents = ((value.name, value.content) for value in values(config))
    return {name: content for name, content in contents if isinstance(content, ModelConfig)}


def check_numbers(config: RunConfig) -> None:
    """Raise ConfigError, naming file and tensor, if the weights that a model starts from hold NaN.
    Reads all of them: a run finds NaN when it loads them.
    """
    folders = {f"{name}.hf_path": (part.hf_path, part) for name, part in models_of(config).items()}
    start = config.trainer.checkpoint.initial_load_path
    folders["trainer.checkpoint.initial_load_path"] = start, config.model
    if isinstance(config, RLConfig):
        folders["critic.checkpoint"] = config.critic.checkpoint, config.model
        for name, role in config.roles.items():
            folders[f"roles.{name}.checkpoint"] = role.checkpoint, role.model
    for field, (path, model) in folders.items():
        if not path or (isinstance(path, Snapshot) and path.missing()):
            continue
        try:
            if Path(path, "config.json").is_file():
                check_finite(Path(path), shape_of(model))
            else:
                check_checkpoint(Path(path))
        except (ConfigError, RunError) as error:
            raise ConfigError(str(error)).inside(field) from None


def find_models(config: RunConfig) -> None:
    """Replace names on the Hub by the folders of their snapshots: see :func:`rl.model.hub.locate`.

    A run that is resumed keeps the commits that it began with, unless the config names others.
    """
    for section, model in models_of(config).items():
        if is_name(model.hf_path or ""):
            saved = saved_section(config, section)
            asks = re.fullmatch("[0-9a-f]{40}", model.revision or "")  # for a commit
            if saved.get("hf_path") == model.hf_path and not asks:
                model.revision = saved.get("revision")
        locate(model, section)


def saved_section(config: RunConfig, name: str) -> dict[str, Any]:
    """Return section ``name`` of the run that ``config`` resumes, as its config.json has it.

    It is empty if the config resumes no run, or if the run has no such section.
    """
    path = Path(config.output_dir, "config.json")
    if config.resume and config.output_dir and path.is_file():
        content = read_config_file(path, f"--resume: {path}")
        with suppress(AttributeError, KeyError):  # the run had another task or role
            saved = value_of(content, f"config.{name}")
            return saved if isinstance(saved, dict) else {}
    return {}


def validate_folders(config: RunConfig) -> None:
    """Raise ConfigError, naming field, file and tensor, if a folder does not hold the weights that
    the trained model needs.
    """
    if config.model.hf_path is not None:
        validate_start("model.hf_path", config.model.hf_path, config)
    checkpoint = config.trainer.checkpoint
    field = "trainer.checkpoint.initial_load_path"
    path = checkpoint.initial_load_path
    if path and checkpoint.initial_load_in_hf:
        validate_start(field, path, config)
    elif path:
        fix = "set initial_load_in_hf for a Hugging Face folder"
        require_value(Path(path, ".metadata").is_file(), field, path, COMPLETE, fix)


def validate_other_folders(config: RLConfig) -> None:
    """Raise ConfigError likewise for the folders of critic and roles."""
    if config.critic.checkpoint is not None:
        _check_start("critic.checkpoint", config.critic.checkpoint, config.model, "values")
    for name, role in config.roles.items():
        field = f"roles.{name}"
        folder = role.model.hf_path
        shape_of(role.model, field=f"{field}.model.hf_path")
        if role.checkpoint is not None:
            _check_start(f"{field}.checkpoint", role.checkpoint, role.model, role.head)
        elif folder is not None:
            _check(f"{field}.model.hf_path", folder, role.model, role.head)
        else:
            rule = f"the folder of the weights, unless {field}.model.hf_path is"
            raise ConfigError(field=f"{field}.checkpoint", allowed=rule)


def validate_start(field: str, path: str, config: RunConfig) -> None:
    """Raise ConfigError, naming ``field``, unless the trained model of ``config`` can start from
    the Hugging Face folder ``path``.
    """
    _check(field, path, config.model, config.models()["trainer"].head, needs_head=False)


def _check_start(field: str, path: str, model: ModelConfig, head: Head) -> None:
    """Raise ConfigError, naming ``field``, unless a model with ``head`` can start from ``path``."""
    if Path(path, "config.json").is_file():
        _check(field, path, model, head)
    else:
        holds = Path(path, ".metadata").is_file()
        require_value(holds, field, path, f"{COMPLETE}, or a Hugging Face folder")


def _check(
    field: str, path: str, model: ModelConfig, head: Head, *, needs_head: bool = True
) -> None:
    """Raise ConfigError unless the folder ``path`` holds the weights of a model with ``head`` that
    has the sizes of ``model``.
    """
    ours = shape_of(model)
    named = dataclasses.replace(model, hf_path=path, max_seq_len=ours.max_seq_len)
    theirs = shape_of(named, field=field)
    for key in (attribute.name for attribute in dataclasses.fields(ModelShape)):
        actual = getattr(theirs, key)
        needed = getattr(ours, key)
        rule = f"the folder of a model whose {key} is {needed}, not {actual}"
        require_value(key in OWN_FIELDS or actual == needed, field, path, rule)
    try:
        if not (isinstance(path, Snapshot) and path.missing()):  # else checked once downloaded
            check_folder(Path(path), ours, head, needs_head=needs_head)
    except ConfigError as error:
        raise error.inside(field) from None
