"""Exports are models that transformers loads; ranks read and write their own shards."""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from torchtitan.components.lora import LoRAConverter

from rl.errors import RunError
from rl.model.shape import ModelConfig
from rl.training import hugging_face_folders
from rl.training.hugging_face_names import TensorPiece
from rl.training.sharded_model import is_adapter
from tests.kit.batches import ragged_batch
from tests.kit.family_cases import ONE_EACH, UNSHARDED
from tests.kit.layouts import LAYOUTS, Layout
from tests.kit.model_cases import EQUAL
from tests.kit.model_folders import (
    Folder,
    edit_tensors,
    open_folder,
    same_tensors,
    shards,
    tensors_of,
    transformers_logits,
    transformers_model,
)
from tests.kit.ranks import on_ranks
from tests.kit.scenes import (
    CLAMPED,
    MODELS,
    SIZES,
    checkpointer_of,
    engine_of,
    exported,
    full_disk,
    loaded,
    logits_of,
    rows_of,
    share,
)
from tests.kit.tables import long

NORM = "model.norm.weight"


@pytest.fixture
def source(tmp_path):
    """A folder that transformers saved."""
    return Folder().write(tmp_path / "in")


@pytest.mark.parametrize("kept", ["adapters", "value head"])
def test_weights_that_a_folder_may_lack_are_drawn(tmp_path, source, kept):
    model = ModelConfig(hf_path=str(source))
    options = {"lora": LoRAConverter.Config(rank=2)} if kept == "adapters" else {"head": "values"}
    engine = engine_of(model, folder=str(tmp_path), loads=True, **options)
    drawn = {name for name, each in engine.model.named_parameters() if not each.isnan().any()}
    assert drawn
    if kept == "adapters":
        assert all(map(is_adapter, drawn))
    else:
        assert drawn == {"lm_head.weight"}
    loaded(engine, str(tmp_path), model)
    assert not any(parameter.isnan().any() for parameter in engine.model.parameters())


@pytest.mark.parametrize("name", [*MODELS, "clamped"])
def test_a_policy_from_random_weights_is_one_that_transformers_loads(tmp_path, name):
    model = replace(MODELS.get(name, CLAMPED), max_seq_len=64, rope_theta=1e4)
    engine = engine_of(model, folder=str(tmp_path))
    out = exported(engine, model, tmp_path)
    tokens = torch.randint(SIZES["vocab_size"], (1, 64), generator=torch.Generator().manual_seed(1))
    assert (logits_of(engine, tokens) - transformers_logits(out, tokens)).abs().max() <= 1e-5
    assert ("lm_head.weight" in tensors_of(out)) == (not model.tie_embeddings)
    again, checkpointer = open_folder(
        out, tmp_path / "again", fuse_qkv=model.fuse_qkv, family=model.family
    )
    checkpointer.close()
    assert torch.equal(logits_of(again, tokens), logits_of(engine, tokens))


def test_a_tensor_that_does_not_fit_is_an_error_that_names_it(tmp_path, source):
    edit_tensors(source, model__norm__weight=torch.ones(33))
    with pytest.raises(RunError, match=rf"model.safetensors: {NORM} is \[33\], the model's is"):
        open_folder(source, tmp_path)


def test_a_checkpoint_of_the_run_precedes_the_initial_folder(tmp_path, source):
    engine, checkpointer = open_folder(source, tmp_path)
    with torch.no_grad():
        engine.shards()["norm.weight"].tensor.fill_(7.0)
    checkpointer.save(1, {"step": 1})
    checkpointer.close()
    model = ModelConfig(hf_path=str(source))
    engine = engine_of(model, folder=str(tmp_path))
    assert loaded(engine, str(tmp_path), model) == {"step": 1}
    assert (engine.shards()["norm.weight"].tensor == 7.0).all()


# Exports.


def test_large_weights_are_split_over_files_as_hugging_face_does(tmp_path, monkeypatch):
    monkeypatch.setattr("rl.training.hugging_face_folders.FILE_BYTES", 20_000)
    model = ModelConfig(**SIZES, max_seq_len=64)
    out = exported(engine_of(model, folder=str(tmp_path)), model, tmp_path)
    files = sorted(out.glob("*.safetensors"))
    assert [path.name for path in files] == [
        f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)
    ]
    assert len(files) > 2
    assert all(path.stat().st_size < 22_000 for path in files)
    transformers_model(out)


def test_a_failed_export_keeps_the_previous_one_and_the_next_replaces_it(tmp_path, source):
    out = tmp_path / "out"
    engine, checkpointer = open_folder(source, tmp_path)
    checkpointer.export_hf(str(out))
    with torch.no_grad():
        engine.shards()["norm.weight"].tensor.fill_(7.0)
    failure = pytest.raises(RunError, match="export failed on rank 0: OSError: .*File too large")
    with failure, full_disk():
        checkpointer.export_hf(str(out))
    same_tensors(source, out)
    checkpointer.export_hf(str(out))
    checkpointer.close()
    assert (tensors_of(out)[NORM] == 7.0).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_an_export_does_not_need_the_initial_folder(tmp_path):
    source = shards().write(tmp_path / "in")
    kept = shutil.copytree(source, tmp_path / "kept")
    _, checkpointer = open_folder(source, tmp_path)
    shutil.rmtree(source)
    checkpointer.export_hf(str(tmp_path / "out"))
    checkpointer.close()
    same_tensors(kept, tmp_path / "out")
    transformers_model(tmp_path / "out")


def test_an_export_replaces_only_models(tmp_path, source):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    _, checkpointer = open_folder(source, tmp_path)
    message = "out holds something other than a model; name another folder"
    with pytest.raises(RunError, match=message):
        checkpointer.export_hf(str(tmp_path / "out"))
    checkpointer.close()
    assert (tmp_path / "out" / "thesis.txt").is_file()


def adopted(folder: str, layout: Layout, export: str) -> dict[str, Any]:
    """Load a Hugging Face folder, compute the outputs of a batch, and export the folder again."""
    model = ModelConfig(hf_path=folder)
    engine = engine_of(model, folder=export, layout=layout)
    checkpointer = checkpointer_of(engine, export, model)
    state = checkpointer.load()
    outputs = engine.forward(share(engine, ragged_batch()))
    checkpointer.export_hf(export)
    checkpointer.close()
    return {
        "run_state": state,
        "outputs": outputs,
        "version": engine.version,
        "parts": [shard.box.numel for shard in engine.shards().values()],
        "share": rows_of(engine, ragged_batch()),
    }


class CountedSlice:
    """A slice of a safetensors file, which counts the elements that are read."""

    def __init__(self, stored: Any, read: list[int]):
        self._stored = stored
        self._read = read

    def __getitem__(self, index: Any) -> torch.Tensor:
        values = self._stored[index]
        self._read.append(values.numel())
        return values


def adopt_and_count(folder: str, layout: str, export: str) -> dict[str, Any]:
    """``adopted``, and the elements of each piece that this rank reads and writes."""
    read: list[int] = []
    written: list[int] = []

    @contextlib.contextmanager
    def open_counted(*args: Any, **kwargs: Any) -> Iterator[SimpleNamespace]:
        with safe_open(*args, **kwargs) as file:
            yield SimpleNamespace(get_slice=lambda name: CountedSlice(file.get_slice(name), read))

    def write_counted(file: int, piece: TensorPiece, start: int, values: torch.Tensor) -> None:
        written.append(values.numel())
        write_piece(file, piece, start, values)

    write_piece = hugging_face_folders._write_piece
    with (
        mock.patch.object(hugging_face_folders, "safe_open", open_counted),
        mock.patch.object(hugging_face_folders, "_write_piece", write_counted),
    ):
        return adopted(folder, LAYOUTS[layout], export) | {"read": read, "written": written}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("several files", "fsdp2_tp2"),
        long("several files", "hsdp4"),
        long("gpt_oss, several files", "fsdp2_tp2"),
        long("gpt_oss, several files", "fsdp2_tp2_ep2"),
        *(long(name, "tp2") for family, name in ONE_EACH.items() if family not in UNSHARDED),
    ],
)
def test_ranks_read_and_write_their_own_parts_of_the_whole_piece_by_piece(tmp_path, name, layout):
    source = EQUAL[name].write(tmp_path / "in")
    out = tmp_path / "out"
    answers = on_ranks(LAYOUTS[layout].ranks, adopt_and_count, str(source), layout, str(out))
    same_tensors(source, out)
    rows = ragged_batch().tokens.split(ragged_batch().lengths.tolist())
    reference = transformers_model(source)
    for answer in answers:
        assert (answer["run_state"], answer["version"]) == ({}, 0)
        tokens = [rows[row] for row in answer["share"]]
        logprobs = answer["outputs"]["logprobs"].split([len(row) for row in tokens])
        for row, found in zip(tokens, logprobs, strict=True):
            with torch.no_grad():
                every = reference(row.unsqueeze(0)).logits[0, :-1].log_softmax(-1)
            wanted = every.gather(1, row[1:].unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(found[1:], wanted, atol=1e-5, rtol=0)
        # once to load the model, once to compare the export with it
        assert sum(answer["read"]) == sum(answer["parts"]) + sum(answer["written"])
        assert max(answer["read"]) <= max(answer["parts"])
        assert max(answer["written"], default=0) <= max(answer["parts"])
    everything = sum(tensor.numel() for tensor in tensors_of(source).values())
    assert sum(sum(answer["written"]) for answer in answers) == everything  # none twice
