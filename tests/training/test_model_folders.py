"""A model folder gives the same model as in transformers, or an error that names the defect."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from torchtitan.config import ParallelismConfig
from transformers import AutoConfig

from configs.quickstart import quickstart
from rl.config import RLConfig, RoleConfig
from rl.errors import ConfigError, RunError
from rl.model.families import BUILT_IN
from rl.model.shape import ModelConfig, hf_config, shape_of
from rl.training.engine import TrainingEngine
from rl.types.batch import Batch
from rl.validation import validate
from rl.validation.folders import check_numbers
from tests.kit.family_cases import ALL, family_in
from tests.kit.model_cases import EQUAL, HEAD, REFUSED, UP
from tests.kit.model_folders import (
    Folder,
    edit_config,
    open_folder,
    same_tensors,
    tensors,
    transformers_logits,
    truncate,
)
from tests.kit.scenes import logits_of
from tests.kit.tables import cases


def config_of(folder) -> RLConfig:
    """A run that starts from ``folder``."""
    config = quickstart()
    config.model = ModelConfig(hf_path=str(folder))
    return config


DISTINCT = {
    "as the Hub has it",
    "tied, its head stored",
    "no tie_word_embeddings",
    "no rope_theta",
    "two rope_thetas",
    "no head_dim",
    "no num_key_value_heads",
    "float16",
    "float64 in the file",
    "several files",
    "one file and an index",
    "experts, as the Hub has them",
    "experts, no moe_intermediate_size",
    "llama 3.1, older keys",
    "llama, biases",
    "qwen2, yarn",
    "mistral, heads that do not divide the width",
    "smollm3, a list of layers",
    "mistral, windows",
    "gpt_oss, as the Hub has it",
    "swish",
    "names without model.",
    "tied, its head alone stored",
    "float32 norms beside bfloat16 matrices",
    "float32 in the file of a bfloat16 model",
    "llama, a window that it ignores",
    "mistral, layers with and without windows",
    "qwen3_5_text, within a model with vision",
    "qwen3_5_text, no layer_types",
    "gemma2",
    "qwen3_5_moe_text, all experts in one tensor",
}
"""Folders of which each is read in another way. Others are for the long tests."""

SPLIT = {"no head_dim", "several files"}
"""Folders whose q, k and v are not fused."""
REWRITTEN = {"tied, its head stored", "float64 in the file", "tied, its head alone stored"}
REWRITTEN |= {"names without model.", "names with model. twice"}
REWRITTEN |= {"qwen3_5_moe_text, all experts in one tensor"}
"""Folders whose tensors an export changes."""
VISION = {f"{kind}, within a model with vision" for kind in ("qwen3_5_text", "qwen3_5_moe_text")}
"""Folders of models with vision, of which an export has the language model."""


def test_each_family_has_eight_folders():
    counts = Counter(map(family_in, ALL.values()))
    assert {family: counts[family] for family in BUILT_IN if counts[family] < 8} == {}


@pytest.mark.parametrize("name", cases(ALL, DISTINCT))
def test_logits_and_export_are_those_of_transformers(tmp_path, name):
    folder = ALL[name].write(tmp_path / "in")
    out = tmp_path / "out"
    validate(config_of(folder))
    tokens = torch.randint(40, (2, 24), generator=torch.Generator().manual_seed(1))
    wanted = transformers_logits(folder, tokens)
    assert wanted.std() > 0.3
    engine, checkpointer = open_folder(folder, tmp_path, fuse_qkv=name not in SPLIT)
    checkpointer.export_hf(str(out))
    checkpointer.close()
    assert (logits_of(engine, tokens) - wanted).abs().max() <= 1e-5
    # of Qwen3.5, transformers' own log-probs are up to 1.1e-5 from those in float64
    most = 2e-5 if name.startswith("qwen3_5") else 1e-5
    assert error_of_logprobs(engine, folder, 150) <= most
    assert torch.equal(transformers_logits(out, tokens), wanted)
    if name not in REWRITTEN | VISION:
        same_tensors(folder, out)
    written, given = (json.loads((each / "config.json").read_text()) for each in (out, folder))
    if name in VISION:
        given = {**given["text_config"], "architectures": written["architectures"]}
    assert written == given
    assert [path.name for path in out.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"generator.enforce_eager": False},
            "enforce_eager is False; it must be True for a model",
        ),
        (
            {"generator.tensor_parallel_degree": 4},
            "tensor_parallel_degree is 4; it must divide .*delta_key_heads=2, and .*: allowed are",
        ),
        ({"parity": "bitwise"}, "parity is 'bitwise'; it must be 'close' for a model with gated"),
        (
            {"trainer.prompt_sharing": 2},
            "prompt_sharing is 2; it must be 1 for a model with gated",
        ),
        (
            {"trainer.parallelism": ParallelismConfig(context_parallel_degree=2)},
            "trainer.parallelism.context_parallel_degree is 2; it must be 1 for a model with gated",
        ),
        (
            {"trainer.parallelism": ParallelismConfig(tensor_parallel_degree=4)},
            "tensor_parallel_degree is 4; it must divide .*delta_key_heads=2: allowed are",
        ),
    ],
    ids=["graphs", "generator", "parity", "shared prompts", "context parallelism", "heads"],
)
def test_gated_delta_nets_are_refused_where_their_state_would_be_lost(tmp_path, change, message):
    config = config_of(EQUAL["qwen3_5_text"].write(tmp_path))
    for name, value in change.items():
        section, _, field = name.rpartition(".")
        setattr(getattr(config, section) if section else config, field, value)
    config.trainer.parallelism.spmd_backend = "partial_dtensor"
    with pytest.raises(ConfigError, match=message):
        validate(config)


def test_bounded_products_have_no_bitwise_parity(tmp_path):
    config = config_of(EQUAL["gemma2"].write(tmp_path))
    config.parity = "bitwise"
    with pytest.raises(ConfigError, match="parity is 'bitwise'; it must be 'close' for a model wi"):
        validate(config)


@pytest.mark.parametrize("name", ["granite", "gemma2"])
def test_log_probs_are_those_of_scaled_and_bounded_logits(tmp_path, name):
    folder = EQUAL[name].write(tmp_path / "in")
    engine, checkpointer = open_folder(folder, tmp_path)
    checkpointer.close()
    assert error_of_logprobs(engine, folder, 24, temperature=0.5) <= 1e-5


def error_of_logprobs(
    engine: TrainingEngine, folder: Path, length: int, *, temperature: float = 1.0
) -> float:
    """Return the largest difference of the log-probs of random tokens from transformers'."""
    tokens = torch.randint(40, (1, length), generator=torch.Generator().manual_seed(1))
    batch = Batch(tokens=tokens[0], lengths=torch.tensor([length]), loss_weights=torch.ones(length))
    ours = engine.forward(batch, temperature=temperature)["logprobs"]
    wanted = (transformers_logits(folder, tokens)[0, :-1] / temperature).log_softmax(-1)
    wanted = wanted.gather(-1, tokens[0, 1:, None]).flatten()
    return (ours[1:] - wanted).abs().max().item()


WITHOUT_EFFECT = {"_name_or_path", "architectures", "initializer_range", "pad_token_id"}
WITHOUT_EFFECT |= {"dtype", "pretraining_tp", "no_rope_layer_interval"}
WINDOW = {"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"}
"""Keys of a window that holds the longest sequence."""


@pytest.mark.parametrize("name", ALL)
def test_the_written_config_is_the_one_that_transformers_reads(tmp_path, name):
    folder = ALL[name].write(tmp_path / "in")
    theirs = AutoConfig.from_pretrained(folder).get_text_config()
    shape = shape_of(ModelConfig(hf_path=str(folder)))
    ours = type(theirs)(**hf_config(shape))
    wanted, written = (each.to_dict() for each in (theirs, ours))
    if wanted.get("hidden_act") == "swish":
        wanted["hidden_act"] = "silu"
    wanted["attention_dropout"] = wanted.get("attention_dropout") or 0.0
    ropes = wanted["rope_parameters"]
    if "full_attention" in ropes:  # beside which transformers ignores others
        wanted["rope_parameters"] = ropes = {
            kind: each for kind, each in ropes.items() if isinstance(each, dict)
        }
    rope = ropes.get("full_attention", ropes)
    rope.pop("type", None)
    if "long_factor" in rope:
        ratio = wanted["max_position_embeddings"] / wanted["original_max_position_embeddings"]
        rope.setdefault("factor", ratio)
    if theirs.model_type == "phi3":  # its window or its longrope limits what Tiller trains
        wanted["max_position_embeddings"] = shape.max_seq_len
    length = "original_max_position_embeddings"
    if shape.rope_scaling:
        rope |= {length: wanted[length]} if length in wanted else {}
        for name in ("beta_fast", "mscale"):
            if rope.get(name) == 0:  # as if it were missing
                del rope[name]
    else:
        plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        if "partial_rotary_factor" in written["rope_parameters"]:
            plain["partial_rotary_factor"] = rope["partial_rotary_factor"]
        wanted["rope_parameters"] = plain if rope is ropes else ropes | {"full_attention": plain}
    if rope is not ropes and not shape.layers_with_local_rope:
        for each in (wanted, written):
            del each["rope_parameters"]["sliding_attention"]
    if "alpha" in rope:  # it becomes a part of the base
        del wanted["rope_parameters"], written["rope_parameters"]
    differ = {key for key in type(theirs)().to_dict() if wanted.get(key) != written.get(key)}
    if theirs.model_type in ("glm4", "qwen3_5_text"):  # which read it from rope_parameters
        differ -= {"partial_rotary_factor"}
    assert differ <= WITHOUT_EFFECT | (WINDOW if not shape.window else {"max_window_layers"})


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_of_another_model_or_a_damaged_one_is_refused(tmp_path, name):
    folder, message = REFUSED[name]
    with pytest.raises(ConfigError, match=f"^model.hf_path: .*{message}"):
        validate(config_of(folder.write(tmp_path / "in")))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(tmp_path, value):
    folder = Folder(damage=tensors(**{UP: torch.full((48, 64), value)})).write(tmp_path / "in")
    text = f"model.safetensors: {UP} holds NaN or infinity"
    with pytest.raises(RunError, match=text):
        open_folder(folder, tmp_path)
    with pytest.raises(ConfigError, match=f"^model.hf_path: .*{text}"):  # of plan and doctor
        check_numbers(config_of(folder))


CHECKPOINTS = {
    "trainer.checkpoint.initial_load_path": lambda config, folder: setattr(
        config.trainer.checkpoint, "initial_load_path", folder
    ),
    "critic.checkpoint": lambda config, folder: setattr(config.critic, "checkpoint", folder),
    "roles.teacher.checkpoint": lambda config, folder: config.roles.update(
        teacher=RoleConfig(model=config.model, checkpoint=folder)
    ),
}


@pytest.mark.parametrize("field", CHECKPOINTS)
def test_weights_of_a_checkpoint_that_are_no_numbers_are_found_by_plan_and_doctor(tmp_path, field):
    config = config_of(Folder().write(tmp_path / "whole"))
    damage = tensors(**{UP: torch.full((48, 64), float("nan"))})
    CHECKPOINTS[field](config, str(Folder(damage=damage).write(tmp_path / "in")))
    with pytest.raises(ConfigError, match=f"^{field}: .*{UP} holds NaN or infinity"):
        check_numbers(config)


@pytest.mark.parametrize(
    ("tie", "stored"), [(None, HEAD), (None, None)], ids=["its head", "no head"]
)
def test_a_model_with_tie_word_embeddings_of_null_has_a_head_of_its_own(tmp_path, tie, stored):
    """As in transformers before it refused null."""
    damage = tensors() if stored else tensors(lm_head__weight=None)
    folder = Folder(config={"tie_word_embeddings": tie}, damage=damage).write(tmp_path / "in")
    if stored:
        validate(config_of(folder))
        assert not shape_of(ModelConfig(hf_path=str(folder))).tie_embeddings
    else:
        with pytest.raises(ConfigError, match="lacks lm_head.weight"):
            validate(config_of(folder))


@pytest.fixture
def pair(tmp_path) -> tuple[Path, Path]:
    """Two folders of the same model, to damage one of them."""
    one = Folder().write(tmp_path / "one")
    return one, Path(shutil.copytree(one, tmp_path / "other"))


def test_folders_of_roles_are_read_before_a_process_starts(pair):
    good, bad = pair
    config = config_of(good)
    config.roles["teacher"] = RoleConfig(model=ModelConfig(hf_path=str(bad)))
    validate(config)
    truncate(bad)
    field = "roles.teacher.model.hf_path"
    with pytest.raises(ConfigError, match=f"^{field}: .*other/model.safetensors cannot be read"):
        validate(config)
    edit_config(bad, attention_dropout=0.1)
    with pytest.raises(ConfigError, match=f"^{field}: attention_dropout .* is 0.1"):
        validate(config)


def test_an_initial_hugging_face_folder_is_read_before_a_process_starts(pair):
    good, bad = pair
    config = config_of(good)
    checkpoint = config.trainer.checkpoint
    field = "trainer.checkpoint.initial_load_path"
    checkpoint.initial_load_path = str(bad)
    checkpoint.initial_load_in_hf = True
    validate(config)
    truncate(bad)
    with pytest.raises(ConfigError, match=f"^{field}: .*other/model.safetensors cannot be read"):
        validate(config)
    edit_config(bad, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    message = f"^{field} is .* model whose rope_theta is 500000.0, not 10000.0"
    with pytest.raises(ConfigError, match=message):
        validate(config)


def test_an_initial_checkpoint_that_is_missing_is_refused(tmp_path):
    config = quickstart()
    config.trainer.checkpoint.initial_load_path = str(tmp_path)
    message = "initial_load_path is .*; it must be the folder of a complete checkpoint"
    with pytest.raises(ConfigError, match=message):
        validate(config)
    (tmp_path / ".metadata").touch()
    validate(config)
