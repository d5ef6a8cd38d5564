"""Models by their names on the Hub."""

import json
import pickle
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import _tree_cache, constants
from safetensors.torch import load, save

from rl.cli.arguments import find_config
from rl.config import RoleConfig, RunConfig
from rl.config.frozen import frozen
from rl.doctor.__main__ import main as doctor
from rl.errors import ConfigError
from rl.model import hub as hub_module
from rl.model.hub import locate
from rl.model.shape import ModelConfig, shape_of
from rl.model.tokenizer import load_tokenizer
from rl.plan.__main__ import main as plan
from rl.session.session import Session
from rl.session.session_config import SessionConfig
from rl.validation import validate
from rl.validation.folders import find_models
from tests.kit.hub import TOKEN, files_of
from tests.kit.tables import check_rows

NAME = "tiller/tiny"
ONE = "model.safetensors"
SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
UNREAD = (
    *("README.md", "pytorch_model.bin", "tiny.gguf", "flax_model.msgpack", ".gitattributes"),
    *("onnx/model.onnx", "onnx/config.json", "original/consolidated.00.pth"),
    *("original/model.safetensors", "original/params.json"),
)
OTHER = "0" * 40
NOBODY = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def files(chat_model) -> dict[str, bytes]:
    """Files of a model that chats, with weights in one file."""
    return files_of(chat_model)


@pytest.fixture(scope="module")
def in_two(files) -> dict[str, bytes]:
    """The same with weights in two files, and an outdated file of all."""
    tensors = load(files[ONE])
    halves = [[*tensors][0::2], [*tensors][1::2]]
    index = {name: file for file, names in zip(SHARDS, halves, strict=True) for name in names}
    content = {"model.safetensors.index.json": json.dumps({"weight_map": index}).encode()}
    for file, names in zip(SHARDS, halves, strict=True):
        content[file] = save({name: tensors[name] for name in names}, {"format": "pt"})
    return files | content | {ONE: b"outdated"}


@pytest.fixture
def here(hub, tmp_path, monkeypatch) -> Path:
    """An empty folder in which programs start."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def model_of(name: str = NAME, revision: str | None = None) -> ModelConfig:
    return ModelConfig(hf_path=name, revision=revision)


def fetched(model: ModelConfig) -> list[str]:
    """Download what a run reads of ``model``; return the lines of progress."""
    lines: list[str] = []
    SessionConfig(model=model).fetch_models(lines.append)
    return lines


def refusal(work, *arguments) -> str:
    with pytest.raises(ConfigError) as refused:
        work(*arguments)
    return str(refused.value)


def test_a_name_brings_the_files_that_a_run_reads_and_no_others(hub, here, in_two, tmp_path):
    commit = hub.add(NAME, in_two | dict.fromkeys(UNREAD, b"of no use"))
    model = model_of()
    locate(model, "model")
    described = {name for name in in_two if not name.endswith(".safetensors")}
    assert {*hub.asked} == described
    assert (model.hf_path.name, model.revision) == (NAME, commit)
    assert Path(model.hf_path).is_relative_to(tmp_path / "hf" / "hub")
    assert shape_of(model).dtype == "float32"
    assert load_tokenizer(model.hf_path).chat_template
    fetched(model)
    assert {*hub.asked} == described | {*SHARDS}
    assert {path.name for path in Path(model.hf_path).iterdir()} == described | {*SHARDS}
    asked = len(hub.asked)
    fetched(model_of())
    assert len(hub.asked) == asked, "what is in the cache is not downloaded again"


def test_a_folder_wins_over_a_name(hub, here, files):
    hub.add(NAME, files)
    (here / NAME).mkdir(parents=True)
    model = model_of()
    locate(model, "model")
    assert (model.hf_path, hub.calls) == (NAME, 0)
    model.revision = "main"
    message = "model.revision is 'main'; it must be None, unless model.hf_path is a name on the Hub"
    assert refusal(locate, model, "model") == message


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub, here, files):
    first = hub.add(NAME, files)
    second = hub.repositories[NAME].commit(files | {"new.json": b"{}"}, "main", "v2")
    for revision, commit in ((None, second), ("v2", second), (first, first)):
        model = model_of(revision=revision)
        locate(model, "model")
        assert model.revision == commit
        assert Path(model.hf_path, "new.json").exists() == (commit == second)


def test_what_is_wrong_with_a_name_is_said_with_its_fix(hub, here, files):
    hub.add(NAME, files)
    hub.add("tiller/gated", files, access="gated")
    hub.add("tiller/private", files, access="private")
    hub.add("tiller/pickled", {name: b"{}" for name in files if name != ONE} | {"model.bin": b""})
    unknown = f"there is no folder {{!r}}, and {hub.url} shows no repository of that name; correct"
    no_folder = "model.hf_path: there is no folder {!r}; name one with a model"
    rows = [
        ("tiller/none", None, f"model.hf_path: {unknown}"),
        ("tiller/private", None, "set HF_TOKEN if the repository is private"),
        ("tiller/two--dashes", None, f"model.hf_path: {unknown}"),
        ("tiller/gated", None, f"accept its licence at {hub.url}/tiller/gated and set HF_TOKEN"),
        ("tiller/pickled", None, "'tiller/pickled' has no model.safetensors on the Hub; name a"),
        (NAME, "v9", f"model.revision: {NAME} has no branch, tag or commit 'v9'; correct it"),
        (NAME, OTHER, f"model.revision: {NAME} has no branch, tag or commit '{OTHER}'; correct"),
        *((path, None, no_folder) for path in ("../x", "/x", "x/y/z", "x", "x/.y")),
        ("~/x", None, no_folder.format(str(Path("~/x").expanduser()))),
    ]

    def check(row) -> None:
        name, revision, message = row

        def read() -> None:
            model = model_of(name, revision)
            locate(model, "model")
            shape_of(model)

        said = refusal(read)
        assert message.format(name) in said
        assert said.startswith("model.")

    check_rows(rows, check)
    assert unknown.format("tiller/none") in refusal(
        Session, SessionConfig(model=model_of("tiller/none"))
    )


def test_a_token_opens_gated_and_private_repositories(hub, here, files, variable):
    variable("HF_TOKEN", TOKEN)
    for access in ("gated", "private"):
        hub.add(f"tiller/{access}", files, access=access)
        assert fetched(model_of(f"tiller/{access}")) != []


def test_without_the_hub_the_cache_serves(hub, here, files, variable):
    commit = hub.add(NAME, files)
    fetched(model_of())
    hub.repositories[NAME].commit(files | {"new.json": b"{}"})
    hub.add("tiller/half", files)
    half = model_of("tiller/half")
    locate(half, "model")
    calls = hub.calls
    variable("HF_ENDPOINT", NOBODY)
    for offline, reason in (("0", f"{NOBODY} does not answer"), ("1", "HF_HUB_OFFLINE is set")):
        variable("HF_HUB_OFFLINE", offline)
        model = model_of()
        assert fetched(model) == []
        assert model.revision == commit
        said = refusal(locate, model_of("tiller/other"), "model")
        assert (
            f"there is no folder 'tiller/other', {reason}, and {constants.HF_HUB_CACHE} has" in said
        )
        assert said.endswith("; run hf download tiller/other with a connection to the Hub")
    assert "there is no folder 'tiller/half', HF_HUB_OFFLINE is set, and" in refusal(fetched, half)
    assert hub.calls == calls


def test_offline_a_cache_without_the_listing_of_the_hub_serves(hub, here, files, variable):
    """Other programs fill the cache without it."""
    hub.add(NAME, files)
    fetched(model_of())
    shutil.rmtree(next(Path("../hf/hub").glob("models--*")) / "trees")
    _tree_cache._IN_MEMORY_TREE_CACHE.clear()
    variable("HF_HUB_OFFLINE", "1")
    model = model_of()
    assert fetched(model) == []
    assert shape_of(model).n_layers > 0


def test_a_download_that_breaks_goes_on_where_it_broke(hub, here, files, monkeypatch):
    hub.add(NAME, files, breaks=["close"], chunk_s=0.01)
    monkeypatch.setattr(hub_module, "TELL_S", 0.0)
    lines = fetched(model_of())
    whole = len(files[ONE])
    assert hub.asked[-2] == ONE
    first = int(hub.asked[-1].removeprefix(f"{ONE}+"))
    assert 0 < first <= whole / 2
    assert len(lines) > whole / 2e4
    assert lines[-1] == f"downloading {NAME}: {whole / 1e6:,.1f} MB of {whole / 1e6:,.1f} MB"


def test_a_download_that_fails_keeps_the_files_that_are_complete(hub, here, in_two):
    hub.add(NAME, in_two, breaks=["reset"])
    said = refusal(fetched, model_of())
    assert said.startswith(f"model.hf_path: the download of {NAME} failed: ")
    assert said.endswith("; start again; files that are complete are kept")
    before = len(hub.asked)
    fetched(model_of())
    weights = [name for name in hub.asked if name.endswith(".safetensors")]
    assert sorted(weights[:2]) == SHARDS
    assert len(hub.asked) == before + 1


def test_a_model_that_does_not_fit_the_disk_is_refused_before_its_download(hub, here, files):
    hub.add(NAME, files, sizes={ONE: 10**18})
    said = refusal(fetched, model_of())
    assert said.startswith(f"model.hf_path: {NAME} takes 1,000,000,000,000.0 MB more, and ")
    assert said.endswith("; make room, or set HF_HOME to a folder on a larger disk")
    assert ONE not in hub.asked


def test_weights_that_do_not_fit_config_json_are_refused_once_they_are_there(hub, here, files):
    tensors = load(files[ONE])
    del tensors["model.norm.weight"]
    hub.add(NAME, files | {ONE: save(tensors, {"format": "pt"})})
    said = refusal(fetched, model_of())
    assert said.startswith("model.hf_path: ")
    assert "lacks model.norm.weight; its config.json asks for it" in said


def run_config(**fields) -> RunConfig:
    config = find_config("gsm8k_jsonl")()
    return replace(config, model=replace(config.model, hf_path=NAME), **fields)


def test_a_frozen_config_has_name_and_commit(hub, here, files):
    commit = hub.add(NAME, files)
    config = run_config()
    config.roles["judge"] = RoleConfig(model=model_of(), head="values")
    find_models(config)
    content = json.loads(json.dumps(frozen(config)))
    for model in (content["model"], content["roles"]["judge"]["model"]):
        assert (model["hf_path"], model["revision"]) == (NAME, commit)
    copy = pickle.loads(pickle.dumps(config.model))
    find_models(config)  # as a trainer does with a config that was validated
    assert (copy, copy.hf_path.name) == (config.model, NAME)


def test_a_resumed_run_keeps_its_commit(hub, here, files):
    first = hub.add(NAME, files)
    config = run_config(output_dir=str(here))
    find_models(config)
    content = {"name": "mine", "config": frozen(config)}
    (here / "config.json").write_text(json.dumps(content))
    second = hub.repositories[NAME].commit(files | {"new.json": b"{}"}, "main", "v2")
    hub.add("tiller/other", files | {"other.json": b"{}"})
    for name, revision, resume, commit in (
        (NAME, None, True, first),
        (NAME, "main", True, first),
        (NAME, None, False, second),
        (NAME, second, True, second),
        ("tiller/other", None, True, hub.repositories["tiller/other"].branches["main"]),
    ):
        config = run_config(output_dir=str(here), resume=resume)
        config.model = model_of(name, revision)
        find_models(config)
        assert config.model.revision == commit, (name, revision, resume)


def test_a_host_without_the_folder_is_named(hub, here, files):
    commit = hub.add(NAME, files)
    model = model_of()
    locate(model, "model")
    sent = pickle.dumps(model)
    shutil.rmtree(model.hf_path)
    said = refusal(shape_of, pickle.loads(sent))
    assert said.startswith(f"model.hf_path: there is no folder '{model.hf_path}'; on ")
    assert f"on {socket.gethostname()}, set HF_HOME to a folder that all nodes share, or" in said
    assert said.endswith(f"run there: hf download {NAME} --revision {commit}")


def test_folders_of_checkpoints_are_no_names(hub, here, files):
    hub.add(NAME, files)
    config = run_config()
    config.trainer.checkpoint.initial_load_path = "tiller/other"
    said = refusal(validate, config)
    assert "trainer.checkpoint.initial_load_path is 'tiller/other'; it must be the folder" in said


def test_plan_and_doctor_read_no_weights(hub, here, files, tmp_path, capsys):
    def problems(folder: Path) -> str:
        row = json.dumps({"question": "What is 1 plus 1?", "answer": "#### 2"})
        (folder / "tiny.jsonl").write_text(f"{row}\n" * 40)
        return str(folder / "tiny.jsonl")

    commit = hub.add(NAME, files)
    arguments = f"--config gsm8k_jsonl --model.hf_path {NAME} --task.path {problems(tmp_path)}"
    arguments = [*arguments.split(), "--rollout.max_tokens", "32", "--task.max_prompt_tokens", "99"]
    size = f"{len(files[ONE]) / 1e6:,.1f} MB to download"
    assert plan(arguments) == 0
    assert f"({NAME}, commit {commit}, {size})" in capsys.readouterr().out
    doctor(arguments)
    assert f"note     model.hf_path: {NAME}, commit {commit}, {size}\n" in capsys.readouterr().out
    assert ONE not in hub.asked
    assert not [*here.iterdir()]
