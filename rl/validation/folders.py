"""Checks of the folders that a run's models start from: headers against what the models need."""

import dataclasses
from pathlib import Path

from rl.config import RLConfig, RunConfig
from rl.errors import ConfigError, require
from rl.model.shape import ModelConfig, ModelShape, shape_of
from rl.training.hugging_face_files import check_folder

OWN_FIELDS = ("max_seq_len", "dtype")
"""Fields of ModelShape in which a folder of initial weights may differ from the model."""


def validate_folders(config: RunConfig) -> None:
    """Raise ConfigError, naming field, file and tensor, if a folder does not hold the weights that
    a model needs.
    """
    if config.model.hf_path is not None:
        _check("model.hf_path", config.model.hf_path, shape_of(config.model))
    roles = config.roles if isinstance(config, RLConfig) else {}
    for name, role in roles.items():
        field = f"roles.{name}.model.hf_path"
        shape = shape_of(role.model, field=field)
        if role.model.hf_path is not None and role.checkpoint is None:
            _check(field, role.model.hf_path, shape)
    _validate_initial_load(config)


def _validate_initial_load(config: RunConfig) -> None:
    checkpoint = config.trainer.checkpoint
    field = "trainer.checkpoint.initial_load_path"
    path = checkpoint.initial_load_path
    if not path:
        return
    if not checkpoint.initial_load_in_hf:
        require(
            Path(path, ".metadata").is_file(),
            f"{field} is {path!r}, where no complete checkpoint is; name the folder of one, as "
            "RUN/checkpoints/step-100, or set initial_load_in_hf for a Hugging Face folder",
        )
        return
    ours = shape_of(config.model)
    theirs = shape_of(ModelConfig(hf_path=path), field=field)
    for key in (each.name for each in dataclasses.fields(ModelShape)):
        found = getattr(theirs, key)
        needed = getattr(ours, key)
        require(
            key in OWN_FIELDS or found == needed,
            f"{field} is {path!r}, a model whose {key} is {found}; it must be the model's, "
            f"{needed}",
        )
    _check(field, path, ours)


def _check(field: str, folder: str, shape: ModelShape) -> None:
    try:
        check_folder(Path(folder), shape)
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from None
