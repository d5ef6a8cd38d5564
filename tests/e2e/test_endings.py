"""Each end of a run has its message and exit code, and leaves no process behind."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from rl.train import main
from tests.e2e.runs import PATIENCE_S, TINY, Run


def test_ctrl_c_says_what_will_happen_and_a_second_one_leaves_at_once_without_a_trace(
    tmp_path, monkeypatch
):
    temporary = Path(tempfile.mkdtemp())  # short, since sockets lie there
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    run = Run(*TINY, "--steps", "100000", folder=tmp_path / "run")
    run.until_step(2)
    run.strike("generator-0", signal.SIGSTOP)  # so that the step cannot be finished
    run.interrupt()
    run.until(lambda: re.search(r"SIGINT: .*sav.*; Ctrl-C again leaves at once", run.stdout))
    with pytest.raises(subprocess.TimeoutExpired):
        run.process.wait(0.3)
    run.interrupt()
    assert run.process.wait(PATIENCE_S) == 130
    how = r"(?:go on from step \d|nothing is saved; start again) with: (.*)"
    said = re.fullmatch(rf"\nleft at once: what came after step \d is lost; {how}\n", run.stderr)
    assert said[1] == f"{run.json('config.json')['command']} --resume"
    run.assert_nothing_left()
    temporary.rmdir()  # which fails if the run left a file
    assert not (run.folder / "owner.json").exists()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_all_processes_lets_the_run_save(number, tmp_path):
    run = Run(*TINY, "--steps", "100000", folder=tmp_path / "run")
    run.until_step(2)
    for pid in run.processes():
        os.kill(pid, number)
    assert run.wait() == 75
    run.assert_nothing_left()
    step = len(run.metrics())
    how = f"interrupted by {number.name} after step {step}"
    assert f"{how}; go on from step {step} with: " in run.stderr
    assert run.stderr.rstrip().endswith(f"--output-dir {run.folder} --resume")
    said = (run.folder / "logs" / "run.log").read_text()
    assert f"  {how}" in said
    assert "  step 1/100000 · reward " in said


@pytest.mark.long
@pytest.mark.parametrize(
    ("signals", "code"),
    [([signal.SIGINT], 130), ([signal.SIGINT, signal.SIGINT], 130), ([signal.SIGUSR1], 75)],
)
def test_a_signal_during_the_start_leaves_nothing(tmp_path, signals, code):
    run = Run(*TINY, folder=tmp_path / "run")
    run.until(lambda: (run.folder / "logs" / "trainer-0.log").exists())
    for number in signals:
        run.process.send_signal(number)
        time.sleep(0.1)
    assert run.wait() == code
    run.assert_nothing_left()
    said = f"interrupted by {signals[0].name} after step 0; nothing is saved; start again with: "
    assert len(signals) > 1 or said in run.stderr


@pytest.mark.long
def test_a_raising_reward_costs_its_group_and_too_many_are_the_named_cause(tmp_path):
    (tmp_path / "my_task.py").write_text(
        textwrap.dedent(
            """
            from dataclasses import dataclass
            from configs.quickstart import quickstart
            from rl.config import RLConfig
            from rl.tasks.copy_digits import CopyDigits

            class Moody(CopyDigits):
                @dataclass(kw_only=True, slots=True)
                class Config(CopyDigits.Config):
                    pass

                def score(self, prompt, text, completion):
                    if prompt.prompt_id == 9 or prompt.prompt_id >= 20:
                        raise ZeroDivisionError("no reward today")
                    return super().score(prompt, text, completion)

            def moody() -> RLConfig:
                config = quickstart()
                config.task = Moody.Config(max_prompt_tokens=16)
                return config
            """
        )
    )
    arguments = ["--config", "my_task.moody", *TINY[2:], "--rollout.max_lost", "0.02"]
    run = Run(*arguments, folder=tmp_path / "run", pythonpath=tmp_path)
    assert run.wait() == 1
    run.assert_nothing_left()
    ledger = run.lines("ledger.jsonl")
    assert [row["dropped_now"] for row in ledger] == [{}, {}, {"reward raised": [9]}, {}]
    assert ledger[2]["trained_now"] == [8, 10, 11, 12]
    failure = run.json("failure.json")
    cause = "ZeroDivisionError: no reward today; prompt 21, sample 0"
    assert (
        "more than rollout.max_lost=0.02 allows; the last: the reward of Moody raised " + cause
        in failure["error"]
    )
    assert failure["step"] == failure["policy_version"] == 4
    assert failure["generator_versions"] == {"generator-0": 4}
    assert failure["ledger"]["trained"] == 16
    assert failure["command"].endswith(f"--output-dir {run.folder} --resume")
    assert "my_task.py" in failure["traceback"]
    assert cause in run.stderr
    assert re.search(rf"\nat {tmp_path / 'my_task.py'}, line \d+, in score\n", run.stderr)
    assert run.stderr.endswith(f" with: {failure['command']}\n")


CRACKED = """
    from dataclasses import dataclass
    from configs.quickstart import quickstart
    from rl.algorithms.losses import ClippedLoss
    from rl.config import RLConfig

    class Cracked(ClippedLoss):
        @dataclass(kw_only=True, slots=True)
        class Config(ClippedLoss.Config):
            pass

        def __call__(self, tokens):
            loss, metrics = super().__call__(tokens)
            return loss * float("nan"), metrics

    def cracked() -> RLConfig:
        config = quickstart()
        config.algorithm.loss = Cracked.Config()
        return config
"""


@pytest.fixture
def cracked(tmp_path):
    """Start a run whose loss is NaN, with options."""
    (tmp_path / "my_loss.py").write_text(textwrap.dedent(CRACKED))
    arguments = ["--config", "my_loss.cracked", *TINY[2:]]
    return lambda *options: Run(*arguments, *options, folder=tmp_path / "run", pythonpath=tmp_path)


@pytest.mark.long
def test_a_loss_that_stays_non_finite_skips_steps_and_then_ends_the_run(cracked):
    run = cracked("--trainer.max-skipped-steps", "2")
    assert run.wait() == 1
    run.assert_nothing_left()
    failure = run.json("failure.json")
    cause = (
        "optim_step: 3 optimizer steps in a row had a gradient norm of nan and were skipped, more "
        "than "
    )
    assert cause + "trainer.max_skipped_steps=2: lower the learning rate" in failure["error"]
    assert (failure["cause"], failure["again"]) == ("gradient", "step")
    assert (failure["step"], failure["policy_version"]) == (2, 0)
    assert [row["trainer/skipped_steps"] for row in run.metrics()] == [1, 2]


@pytest.mark.long
def test_a_run_in_which_no_step_changed_the_weights_fails(cracked):
    run = cracked("--steps", "2")
    assert run.wait() == 1
    run.assert_nothing_left()
    assert run.json("summary.json")["steps_learned"] == 0
    error = "none of 2 steps changed the weights: every gradient was 0 or not finite"
    assert run.json("failure.json")["error"].startswith(error)
    assert error in run.stderr


@pytest.mark.long
def test_a_generator_that_hangs_is_found_and_named(tmp_path):
    arguments = [*TINY, "--steps", "100000", "--deadlines.heartbeat", "6", "--max-restarts", "0"]
    run = Run(*arguments, folder=tmp_path / "run")
    run.until_step(2)
    run.strike("generator-0", signal.SIGSTOP)
    run.until(lambda: (run.folder / "failure.json").exists())
    assert run.wait() == 1
    run.assert_nothing_left()
    failure = run.json("failure.json")
    assert (failure["actor"], failure["rank"], failure["call"]) == ("generator-0", 0, "heartbeat")
    assert failure["error"] == "generator-0 rank 0, heartbeat: no answer within 6 s"
    assert (failure["cause"], failure["again"]) == ("deadline", "")
    assert f"failed after step {failure['step']}: {failure['error']}" in run.stderr


@pytest.mark.long
def test_a_full_disk_ends_the_run_by_name(tmp_path):
    run = Run(*TINY, "--steps", "100000", folder=tmp_path / "run")
    run.until_step(2)
    (run.folder / "metrics.jsonl").unlink()
    (run.folder / "metrics.jsonl").symlink_to("/dev/full")
    assert run.wait() == 1
    run.assert_nothing_left()
    assert "metrics.jsonl: cannot be written: No space left on device" in run.stderr


def refused(arguments: list[str], folder: Path) -> str:
    """Return the message of a command that has to be refused before anything is written."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = main([*arguments, "--output-dir", str(folder)])
    return said.getvalue() if code == 2 and not folder.exists() else f"exit code {code}"


INVALID = [
    (
        ["--config", "gsm8k_jsonl", "--model.hf_path", "/no/such/folder"],
        "model.hf_path: there is no folder",
    ),
    (["--config", "gsm8k_jsonl", "--model.hf_path", "{model}"], "has no *.safetensors"),
    (["--config", "gsm8k_jsonl"], "model.hf_path"),
    (
        [*TINY, "--trainer.parallelism.tensor_parallel_degree", "3"],
        "tensor_parallel_degree is 3; it must divide",
    ),
    (
        [*TINY, "--trainer.parallelism.data_parallel_shard_degree", "0"],
        "data_parallel_shard_degree is 0",
    ),
    (
        [*TINY, "--generator.tensor_parallel_degree", "4"],
        "generator.tensor_parallel_degree is 4",
    ),
    ([*TINY, "--resume"], "--resume: output_dir"),
    ([*TINY, "--rollout.top_p", "1.9"], "rollout.top_p is 1.9; it must be at most 1"),
    (["--config", "quikstart"], "did you mean quickstart or tool_quickstart?"),
]


def test_an_invalid_config_is_refused_before_any_process_starts(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    config = {"model_type": "qwen3", "vocab_size": 8}
    (model / "config.json").write_text(json.dumps(config))
    said = {}
    for arguments, message in INVALID:
        filled = [argument.format(model=model) for argument in arguments]
        said[message] = refused(filled, tmp_path / "run")
    assert {message: text for message, text in said.items() if message not in text} == {}
