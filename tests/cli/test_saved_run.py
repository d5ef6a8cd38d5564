"""Arguments that the programs which read a run refuse before they start anything, and help."""

import json
import re
import shutil
from pathlib import Path

import pytest

from configs.quickstart import quickstart
from rl import evaluate, export
from rl.cli.arguments import parse_config
from rl.cli.saved_run import open_model, open_run
from rl.config.frozen import frozen
from rl.training.trainer_config import one_rank

TWO_NODES = ["--trainer.nodes", "2", "--trainer.parallelism.data_parallel_shard_degree", "2"]
H100S = ["--hardware.device", "h100", "--hardware.gpus_per_node", "8"]


@pytest.fixture
def run(tmp_path) -> Path:
    """A run with two empty checkpoints that look complete, and one that is incomplete."""
    folder = tmp_path / "run"
    for step in (4, 20):
        (folder / "checkpoints" / f"step-{step}").mkdir(parents=True)
        (folder / "checkpoints" / f"step-{step}" / ".metadata").touch()
    (folder / "checkpoints" / "step-24").mkdir()
    write_config(folder)
    return folder


def write_config(folder: Path) -> None:
    content = {"name": "quickstart", "command": "", "config": frozen(quickstart())}
    (folder / "config.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "24"], r"--step 24: .*checkpoints has no such .* of the steps 4, 20"),
        (["--step", "best"], r"--step best: .*checkpoints has no best checkpoint; set best.metric"),
        (TWO_NODES, r"trainer.nodes is 2, and .* one host; add --trainer.nodes 1"),
        (H100S, r"hardware.device is 'h100'; this host computes"),
        (["--stpes", "4"], r"--stpes: there is no such field; did you mean --steps"),
    ],
)
@pytest.mark.parametrize("program", [evaluate, export])
def test_arguments_that_cannot_work(run, program, arguments, message, capsys):
    directory = [str(run.parent / "exported")] if program is export else []
    assert_refused(program, [str(run), *directory, *arguments], message, capsys)
    assert sorted(path.name for path in run.parent.iterdir()) == ["run"]


@pytest.mark.parametrize("count", ["0", "3"])
def test_an_average_is_of_as_many_checkpoints_as_there_are(run, count, capsys):
    message = f"--average is {count}; it must be from 1 to 2, the number of complete checkpoints up"
    assert_refused(export, [str(run), str(run.parent / "new"), "--average", count], message, capsys)


def test_the_best_step_of_a_run_is_loaded(run):
    best = {"metric": "eval/exact_match", "steps": {"4": 0.5, "20": 0.25}}
    (run / "checkpoints" / "best.json").write_text(json.dumps(best))
    assert [open_run(run, step, [], program="test").step for step in ("best", None)] == [4, 20]


@pytest.mark.parametrize("program", [evaluate, export])
def test_a_folder_that_is_no_run(tmp_path, program, capsys):
    directory = [str(tmp_path / "exported")] if program is export else []
    message = f"error: {tmp_path} is not the folder of a run, .* name a folder that"
    assert_refused(program, [str(tmp_path), *directory], message, capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--generator.nodes 1", "generator.nodes is 1, and .* one host; add --generator.nodes 0"),
        ("--prompts 0", "evaluation.prompts is 0; add --prompts P"),
    ],
)
def test_evaluations_need_generators_and_prompts(run, arguments, message, capsys):
    assert_refused(evaluate, [str(run), *arguments.split()], message, capsys)


def test_a_run_that_has_saved_nothing(tmp_path, capsys):
    write_config(tmp_path)
    message = "checkpoints has no complete checkpoint; wait until"
    assert_refused(evaluate, [str(tmp_path)], message, capsys)


@pytest.fixture
def model(chat_model) -> str:
    return str(chat_model)


def test_a_model_whose_config_does_not_fit_or_is_missing(run, model, capsys):
    config = ["--config", "quickstart"]
    refused = [
        ([model], f"{model} holds a Hugging Face model and no task .*; add --config NAME, for"),
        ([], "name the folder of a run, as in .* RUN, or a config, .* DIR --config NAME"),
        ([str(run), *config], f"{run} is not the folder of a Hugging Face model, .* name the f"),
        ([str(run.parent / "no"), *config], "no is not the folder of a Hugging Face model"),
        (["--json", *config, "--step", "4"], "--step 4 is of a run; leave out --config or --step"),
        ([model, *config, "--prompts", "0"], "evaluation.prompts is 0; add --prompts P"),
        ([model, *config, "--modle.dim", "4"], "--modle.dim: there is no such field; did you mean"),
        ([model, "--config", "sft_jsonl"], "task.path is not set; name a JSONL file"),
        ([model, "--config", "quikstart"], "no such config; did you mean quickstart"),
        ([model, *config, "trainer.lora:of"], "trainer.lora:of: there is no such option"),
        (["trainer.lora:of", *config], "trainer.lora:of: there is no such option"),
    ]
    for arguments, message in refused:
        assert_refused(evaluate, arguments, message, capsys)


def test_a_model_of_other_sizes_than_the_runs_own_is_refused(run, model, tmp_path, capsys):
    own = shutil.copytree(model, tmp_path / "own")
    sizes = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(sizes | {"hidden_size": sizes["hidden_size"] * 2}))
    message = f"DIR is '{own}'; it must be the folder of a model whose dim is .*, not "
    arguments = [str(own), "--config", "quickstart", "--model.hf_path", model]
    assert_refused(evaluate, arguments, message, capsys)


def test_help_of_a_config_lists_its_fields(capsys):
    with pytest.raises(SystemExit):
        evaluate.main(["--config", "quickstart", "--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: python -m rl.evaluate --config quickstart [--FIELD VALUE ...]")
    assert "--evaluation.prompts 256" in text
    with pytest.raises(SystemExit):
        evaluate.main(["--config", "tests.e2e.configs.long_prompts", "--help"])
    assert "--evaluation.prompts 256" in capsys.readouterr().out


def test_a_model_is_the_policy_of_its_config_and_other_models_stay(model, tmp_path):
    """The reference of preferences is that of the run, not the model that is evaluated."""
    trained = shutil.copytree(model, tmp_path / "trained")
    short = ["--model.max_seq_len", "64", "--task.max_tokens", "64"]

    def opened(*arguments: str, folder: Path | None = trained):
        run = open_model(folder, "dpo_jsonl", [*short, *arguments], program="here")
        session = run.session_config(evaluates=True)
        policy, reference = session.trainer.checkpoint, session.roles["reference"].trainer
        assert policy.load_only
        assert reference.checkpoint.initial_load_path is None
        return run.config.model.hf_path, policy.initial_load_path, policy.initial_load_in_hf

    assert opened() == (str(trained), str(trained), True)
    assert opened("--model.hf_path", model) == (model, str(trained), True)
    assert opened("--model.hf_path", model, folder=None) == (model, None, False)


def test_a_folder_that_cannot_be_exported_to(run, tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    for folder, said in (
        (run, f"error: {run} exists and is not an empty folder; name another DIR"),
        (file, "file exists and is not"),
        (file / "below" / "exported", "file/below cannot be made: Not a directory; name another"),
    ):
        assert_refused(export, [str(run), str(folder)], said, capsys)


@pytest.mark.parametrize("program", [evaluate, export])
def test_help_begins_with_what_the_program_does_and_has_an_example(program, capsys):
    text = help_of(program, capsys)
    assert program.DESCRIPTION in text
    assert "exit codes: 0 done, 1 failed, 2" in text
    assert ("--generator." in text) == (program is evaluate)


@pytest.mark.parametrize("name", ["qwen3_8b_2_nodes", "qwen3_30b_a3b"])
@pytest.mark.parametrize("program", [evaluate, export])
def test_the_fields_that_help_shows_fit_a_run_of_many_gpus_on_one_host(program, name, capsys):
    lines = [line.split() for line in help_of(program, capsys).splitlines()]
    shown = [words for words in lines if words and re.match(r"--(\w+\.|colocate)", words[0])]
    fields = [word for words in shown for word in words]
    config = parse_config(["--config", name, *fields], program="here")[1]
    assert config.trainer.nodes == 1
    assert config.trainer.parallelism == one_rank()
    if program is evaluate:
        generator = config.generator
        found = (generator.nodes, generator.replicas, generator.tensor_parallel_degree)
        assert (*found, config.colocate) == (0, 1, 1, "all")


def help_of(program, capsys) -> str:
    """Return the help text of a program."""
    with pytest.raises(SystemExit) as end:
        program.main(["--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


def assert_refused(program, arguments, message, capsys):
    """Check that the program exits with 2 and one sentence that matches ``message``."""
    assert program.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.partition("\nAll in ")[0].strip().count("\n") == 0
    assert re.search(message, error), error
