"""Hugging Face folders are loaded and exported bit for bit, and transformers computes the same."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torchtitan.components.lora import LoRAConverter
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rl.errors import RunError
from rl.model.shape import ModelConfig
from rl.training.checkpoint import Checkpointer
from rl.training.model import is_adapter
from tests.training.batches import ragged_batch
from tests.training.disk import adopt_and_count, full_disk
from tests.training.layouts import LAYOUTS
from tests.training.ranks import on_ranks
from tests.training.scenes import SIZES, adopt, engine_of, logits_of

FORMS = {
    "tied": {},
    "untied": {"tied": False},
    "bfloat16": {"dtype": "bfloat16"},
    "several files": {"tied": False, "max_shard_size": "20KB"},
    "several files, tied": {"max_shard_size": "20KB", "theta": 1e4},
}


def write_folder(
    folder: Path, *, tied=True, dtype="float32", max_shard_size="1GB", theta=5e5
) -> Path:
    """A random Qwen3 as transformers saves it, norms and all, with weights large enough to
    matter.
    """
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=SIZES["vocab_size"],
        hidden_size=SIZES["dim"],
        intermediate_size=SIZES["hidden_dim"],
        num_hidden_layers=SIZES["n_layers"],
        num_attention_heads=SIZES["n_heads"],
        num_key_value_heads=SIZES["n_kv_heads"],
        head_dim=SIZES["head_dim"],
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        initializer_range=0.1,
        dtype=dtype,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def transformers_model(folder: Path) -> torch.nn.Module:
    """Return a float32 model. Fails if the folder lacks a weight or has a surplus one."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert {kind: list(names) for kind, names in info.items() if names} == {}
    return model.eval()


def open_folder(source: Path, out: Path, **fields):
    """(engine with the weights of ``source``, its checkpointer)."""
    model = ModelConfig(hf_path=str(source), **fields)
    engine = engine_of(model, folder=str(out), loads=True)
    assert all(parameter.isnan().all() for parameter in engine.model.parameters())
    checkpointer = Checkpointer(engine, model, folder=str(out))
    assert checkpointer.load() == {}
    return engine, checkpointer


def same_tensors(one: Path, other: Path) -> None:
    before = tensors_of(one)
    after = tensors_of(other)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name], tensor), name


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_is_exported_unchanged(tmp_path, form):
    source = write_folder(tmp_path / "in", **FORMS[form])
    out = tmp_path / "out"
    assert len(list(source.glob("*.safetensors"))) > 1 or "several" not in form
    _, checkpointer = open_folder(source, tmp_path)
    checkpointer.export_hf(str(out))
    checkpointer.close()
    same_tensors(source, out)
    assert [path.name for path in out.iterdir() if path.is_dir()] == []
    assert json.loads((out / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )
    transformers_model(out)


@pytest.mark.parametrize("kept", ["adapters", "value head"])
def test_weights_that_a_folder_may_lack_are_drawn(tmp_path, kept):
    source = write_folder(tmp_path / "in", tied=False)
    model = ModelConfig(hf_path=str(source))
    options = {"lora": LoRAConverter.Config(rank=2)} if kept == "adapters" else {"head": "values"}
    engine = engine_of(model, folder=str(tmp_path), loads=True, **options)
    drawn = {name for name, each in engine.model.named_parameters() if not each.isnan().any()}
    assert drawn
    if kept == "adapters":
        assert all(map(is_adapter, drawn))
    else:
        assert drawn == {"lm_head.weight"}
    checkpointer = Checkpointer(engine, model, folder=str(tmp_path))
    checkpointer.load()
    assert not any(parameter.isnan().any() for parameter in engine.model.parameters())
    checkpointer.close()


@pytest.mark.parametrize(
    ("form", "fuse_qkv"),
    [
        ("untied", False),
        ("bfloat16", True),
        ("several files, tied", True),
        *(
            pytest.param(*pair, marks=pytest.mark.long)
            for pair in (("untied", True), ("bfloat16", False), ("several files, tied", False))
        ),
    ],
)
def test_logits_are_those_of_transformers(tmp_path, form, fuse_qkv):
    source = write_folder(tmp_path / "in", **FORMS[form])
    engine, checkpointer = open_folder(source, tmp_path, fuse_qkv=fuse_qkv)
    checkpointer.close()
    tokens = torch.randint(SIZES["vocab_size"], (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = transformers_model(source)(tokens).logits
    assert wanted.std() > 0.3
    assert (logits_of(engine, tokens) - wanted).abs().max() <= 1e-5


@pytest.mark.parametrize("tied", [True, False])
def test_a_policy_from_random_weights_is_one_that_transformers_loads(tmp_path, tied):
    model = ModelConfig(**SIZES, max_seq_len=64, tie_embeddings=tied, rope_theta=1e4)
    engine = engine_of(model, folder=str(tmp_path))
    out = tmp_path / "out"
    checkpointer = Checkpointer(engine, model, folder=str(tmp_path))
    checkpointer.export_hf(str(out))
    checkpointer.close()
    tokens = torch.randint(SIZES["vocab_size"], (1, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = transformers_model(out)(tokens).logits
    assert (logits_of(engine, tokens) - wanted).abs().max() <= 1e-5
    assert ("lm_head.weight" in tensors_of(out)) == (not tied)
    again, checkpointer = open_folder(
        out, tmp_path / "again"
    )  # an export is a folder to start from
    checkpointer.close()
    assert torch.equal(logits_of(again, tokens), logits_of(engine, tokens))


# Folders that do not fit.


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Add, replace or (None) remove tensors of a folder of one file."""
    tensors = tensors_of(folder) | change
    save_file(
        {name: t for name, t in tensors.items() if t is not None},
        folder / "model.safetensors",
        {"format": "pt"},
    )


NORM = "model.norm.weight"
HEAD = "lm_head.weight"
FREQUENCIES = "model.layers.1.self_attn.rotary_emb.inv_freq"
MISFITS = {
    "missing": ({NORM: None}, rf"lacks {NORM}; its config.json asks for it"),
    "missing head": ({HEAD: None}, rf"lacks {HEAD}; its config.json asks for it"),
    "too many": (
        {"model.extra": torch.ones(2), "z": torch.ones(2)},
        r"holds model.extra and 1 more, .* no place",
    ),
    "another shape": (
        {NORM: torch.ones(33)},
        rf"model.safetensors: {NORM} is \[33\], the model's is \[32\]",
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_tensor_that_does_not_fit_is_an_error_that_names_it(tmp_path, misfit):
    source = write_folder(tmp_path / "in", tied=False)
    change, message = MISFITS[misfit]
    rewrite(source, change)
    with pytest.raises(RunError, match=message):
        open_folder(source, tmp_path)


def test_computed_and_tied_tensors_may_be_in_the_folder(tmp_path):
    source = write_folder(tmp_path / "in", tied=True)
    embedding = tensors_of(source)["model.embed_tokens.weight"]
    rewrite(source, {HEAD: embedding.clone(), FREQUENCIES: torch.ones(4)})
    engine, checkpointer = open_folder(source, tmp_path)
    checkpointer.close()
    assert torch.equal(engine.shards()["tok_embeddings.weight"].tensor, embedding)


def test_a_checkpoint_of_the_run_precedes_the_initial_folder(tmp_path):
    source = write_folder(tmp_path / "in")
    engine, checkpointer = open_folder(source, tmp_path)
    with torch.no_grad():
        engine.shards()["norm.weight"].tensor.fill_(7.0)
    checkpointer.save(1, {"step": 1})
    checkpointer.close()
    engine = engine_of(ModelConfig(hf_path=str(source)), folder=str(tmp_path))
    checkpointer = Checkpointer(engine, ModelConfig(hf_path=str(source)), folder=str(tmp_path))
    assert checkpointer.load() == {"step": 1}
    checkpointer.close()
    assert (engine.shards()["norm.weight"].tensor == 7.0).all()


# Exports.


def test_large_weights_are_split_over_files_as_hugging_face_does(tmp_path, monkeypatch):
    monkeypatch.setattr("rl.training.hugging_face.FILE_BYTES", 20_000)
    model = ModelConfig(**SIZES, max_seq_len=64)
    engine = engine_of(model, folder=str(tmp_path))
    out = tmp_path / "out"
    checkpointer = Checkpointer(engine, model, folder=str(tmp_path))
    checkpointer.export_hf(str(out))
    checkpointer.close()
    files = sorted(out.glob("*.safetensors"))
    assert [path.name for path in files] == [
        f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)
    ]
    assert len(files) > 2
    assert all(path.stat().st_size < 22_000 for path in files)
    transformers_model(out)


def test_a_failed_export_keeps_the_previous_one_and_the_next_replaces_it(tmp_path):
    source = write_folder(tmp_path / "in")
    out = tmp_path / "out"
    engine, checkpointer = open_folder(source, tmp_path)
    checkpointer.export_hf(str(out))
    with torch.no_grad():
        engine.shards()["norm.weight"].tensor.fill_(7.0)
    with (
        pytest.raises(RunError, match="export failed on rank 0: OSError: .*File too large"),
        full_disk(),
    ):
        checkpointer.export_hf(str(out))
    same_tensors(source, out)
    checkpointer.export_hf(str(out))
    checkpointer.close()
    assert (tensors_of(out)[NORM] == 7.0).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize("form", ["untied", "several files"])
def test_an_export_does_not_need_the_initial_folder(tmp_path, form):
    source = write_folder(tmp_path / "in", **FORMS[form])
    out = tmp_path / "out"
    kept = Path(shutil.copytree(source, tmp_path / "kept"))
    _, checkpointer = open_folder(source, tmp_path)
    shutil.rmtree(source)
    checkpointer.export_hf(str(out))
    checkpointer.close()
    same_tensors(kept, out)
    transformers_model(out)


def test_an_export_replaces_only_models(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    _, checkpointer = open_folder(write_folder(tmp_path / "in"), tmp_path)
    with pytest.raises(
        RunError, match="out holds something other than a model; name another folder"
    ):
        checkpointer.export_hf(str(tmp_path / "out"))
    checkpointer.close()
    assert (tmp_path / "out" / "thesis.txt").is_file()


# Several ranks.


def test_tensor_parallel_ranks_take_their_parts_and_export_the_whole(tmp_path):
    source = write_folder(tmp_path / "in", tied=True, max_shard_size="20KB")
    out = tmp_path / "out"
    reference = transformers_model(source)
    batch = ragged_batch()
    for answer in on_ranks(LAYOUTS["tp2"].ranks, adopt, str(source), "tp2", str(out)):
        assert (answer["run_state"], answer["version"]) == ({}, 0)
        sizes = batch.lengths.tolist()
        for tokens, logprobs in zip(
            batch.tokens.split(sizes), answer["outputs"]["logprobs"].split(sizes), strict=True
        ):
            with torch.no_grad():
                every = reference(tokens.unsqueeze(0)).logits[0, :-1].log_softmax(-1)
            wanted = every.gather(1, tokens[1:].unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(logprobs[1:], wanted, atol=1e-5, rtol=0)
    same_tensors(source, out)


def test_four_ranks_export_the_weights_they_hold(played):
    answers, folder = played("untied_split", "hsdp4")
    exported = tensors_of(Path(folder) / "export")
    final = answers[0]["final"]
    assert len(exported) == len(final)
    assert torch.equal(exported["lm_head.weight"], final["lm_head.weight"])
    for layer in range(SIZES["n_layers"]):
        ours = f"layers.{layer}"
        theirs = f"model.layers.{layer}"
        for one, other in (
            ("attention.qkv_linear.wk", "self_attn.k_proj"),
            ("feed_forward.w2", "mlp.down_proj"),
        ):
            assert torch.equal(exported[f"{theirs}.{other}.weight"], final[f"{ours}.{one}.weight"])
    transformers_model(Path(folder) / "export")


@pytest.mark.parametrize("layout", ["fsdp2_tp2", pytest.param("hsdp4", marks=pytest.mark.long)])
def test_a_rank_reads_and_writes_its_own_parts_piece_by_piece(tmp_path, layout):
    source = write_folder(tmp_path / "in", tied=False)
    out = tmp_path / "out"
    answers = on_ranks(LAYOUTS[layout].ranks, adopt_and_count, str(source), layout, str(out))
    same_tensors(source, out)
    for answer in answers:
        assert sum(answer["read"]) == sum(answer["parts"])
        assert max(answer["read"]) <= max(answer["parts"])
    everything = sum(tensor.numel() for tensor in tensors_of(source).values())
    assert sum(sum(answer["written"]) for answer in answers) == everything  # none twice
    assert all(
        max(answer["written"]) <= max(answer["parts"]) for answer in answers if answer["written"]
    )
