"""Sessions in a notebook: cells wait for results, and processes stay alive between them."""

import asyncio
import dataclasses
import os
import re
import signal
import threading

import pytest
import torch

import rl
from rl.errors import ConfigError, RankLost, RunError
from rl.tasks.copy_digits import CopyDigits
from rl.types.deadlines import DeadlineConfig
from tests.kit.processes import assert_ended, pids_of

HEARTBEAT_S = 10.0  # imports on a busy machine take seconds in which no rank answers
MODEL = rl.ModelConfig(vocab_size=16, max_seq_len=32)
TASK = CopyDigits.Config(digits=3).build(seed=0, model=MODEL)
PROMPTS = [TASK.prompt(number) for number in range(4)]


def config(**fields) -> rl.SessionConfig:
    defaults = {
        "model": MODEL,
        "generator": rl.GeneratorConfig(kv_cache_gib=0.05),
        "deadlines": DeadlineConfig(heartbeat=HEARTBEAT_S),
    }
    return rl.SessionConfig(**(defaults | fields))


def text() -> rl.Batch:
    """Return a text to fine-tune on; its last four tokens have weight 1."""
    tokens = torch.tensor([*PROMPTS[0].tokens, 7, 8, 9, 2])
    weights = torch.zeros(len(tokens))
    weights[-4:] = 1.0
    return rl.Batch(tokens=tokens, lengths=torch.tensor([len(tokens)]), loss_weights=weights)


def pids(session) -> list[int]:
    """Return the processes of a session."""
    workers = session._rewards._groups.values() if session._rewards is not None else []
    meshes = [*session._groups.values(), *session.pool.meshes]
    scorers = [process.pid for worker in workers for process in worker._processes]
    return [*scorers, *(pid for mesh in meshes for pid in pids_of(mesh))]


def assert_nothing_left(session, started: list[int]) -> None:
    asyncio.run(assert_ended(started))
    assert not session._thread.is_alive()
    assert not session.folder.exists()


@pytest.fixture(scope="module")
def notebook():
    """A session with a trainer, a generator and a reward worker."""
    session = rl.Session(config(), task=TASK.config).blocking().open()
    started = pids(session._session)
    assert len(started) == 3
    yield session
    session.close()
    session.close()
    assert_nothing_left(session, started)


@pytest.mark.long
def test_ranks_compute_with_the_threads_of_their_config():
    engines = {
        "trainer": rl.TrainerConfig(threads=2),
        "generator": rl.GeneratorConfig(kv_cache_gib=0.05, threads=2),
    }
    with rl.Session(config(**engines)).blocking() as session:
        for log in ("trainer-0.log", "generator-0-0.log"):
            text = (session._session.folder / "logs" / log).read_text()
            assert "CPU threads: 2" in text, log


def step(session) -> int:
    """Take a step of GRPO; return the version that the generator then holds."""
    rollouts = session.rollout(TASK, PROMPTS, samples=4, max_tokens=6)
    assert len(rollouts) == 16
    advantages = torch.linspace(-1, 1, 16)
    session.forward_backward(rl.make_batch(rollouts, advantages), rl.losses.grpo())
    assert session.optim_step(lr=1e-3)["trainer/updates"] == 1
    return session.push()


def test_forward_has_the_logprobs_of_cut_distributions(notebook):
    rollouts = notebook.rollout(TASK, PROMPTS, samples=4, max_tokens=6, temperature=0.7, top_k=5)
    batch = rl.make_batch(rollouts)
    assert {*batch.sampling_mask.sizes[batch.loss_mask.numpy()]} == {-1}
    found = notebook.forward(batch, temperature=0.7)["logprobs"]
    apart = (found - batch.columns["behaviour_logprobs"])[batch.loss_mask]
    assert apart.abs().max() <= 1e-5
    whole = dataclasses.replace(batch, sampling_mask=None)
    far = notebook.forward(whole, temperature=0.7)["logprobs"]
    assert (found - far)[batch.loss_mask].min() > 0.1


def test_a_session_says_what_it_is_and_what_a_wrong_call_needs(notebook):
    assert repr(notebook).startswith(
        "<Session, open: trainer (1 rank), 1 x generator (1 rank), policy version "
    )
    for wrong in ("copy 1 2 3", [PROMPTS[0]]):
        with pytest.raises(RunError, match=r"takes a list of rl.GenerationRequest, not .*rollout"):
            notebook.sample(wrong)


def test_a_session_prints_what_it_waits_for(capsys):
    with rl.Session(config(generator=None)).blocking():
        pass
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["starting trainer (1 rank)", "loading weights"]
    assert re.fullmatch(r"the session is open after \d+ s", lines[2])


def test_a_reward_that_a_cell_defines_again_has_effect(notebook, monkeypatch):
    def draw():
        return notebook.rollout(TASK, PROMPTS, samples=4, max_tokens=6)

    first = draw()
    assert all(rollout.reward <= 1 for rollout in first)
    monkeypatch.setattr(CopyDigits, "score", lambda *_: rl.Score(reward=7.0, correct=True))
    second = draw()
    assert {rollout.reward for rollout in second} == {7.0}
    said = [[each.sequences[0].tokens.tolist() for each in part] for part in (first, second)]
    assert said[0] != said[1]


def test_cells_step(notebook):
    before = notebook.version
    assert [step(notebook), step(notebook)] == [before + 1, before + 2]
    assert notebook.generator_versions == {"generator-0": notebook.version}
    assert sum(notebook.restarts.values()) == 0


def interrupted(call, *arguments, after_s: float, **options) -> None:
    """Make a call that Ctrl-C ends."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        with pytest.raises(KeyboardInterrupt):
            call(*arguments, **options)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_ctrl_c_while_sampling_leaves_the_session_usable(notebook):
    many = [TASK.prompt(number) for number in range(400)]
    sampling = {"samples": 16, "max_tokens": 20}
    interrupted(notebook.rollout, TASK, many, **sampling, after_s=0.3)
    step(notebook)  # which has the request ids of the one that was interrupted


def test_ctrl_c_in_a_push_leaves_the_session_usable(notebook, monkeypatch):
    (mesh,) = notebook._session.pool.meshes
    pull_weights = mesh.pull_weights
    pulls = []

    async def slow_pull(version):
        pulls.append(version)
        if len(pulls) == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
            await asyncio.sleep(600)
        return await pull_weights(version)

    monkeypatch.setattr(mesh, "pull_weights", slow_pull)
    interrupted(step, notebook, after_s=300.0)
    assert len(pulls) == 1 or pulls[0] == pulls[1]
    before = notebook.version
    assert step(notebook) == before + 1


def test_fine_tuning_needs_no_generators(tmp_path):
    loss = rl.losses.CrossEntropyLoss.Config()
    with rl.Session(config(generator=None)).blocking() as session:
        started = pids(session._session)
        assert len(started) == 1
        losses = []
        for _ in range(3):
            outputs, _ = session.forward_backward(text(), loss)
            losses.append(-float(outputs["logprobs"][-4:].sum()))
            session.optim_step(lr=1e-2)
        assert losses[0] > losses[1] > losses[2]
        digest = session.weight_digest()
        session.save(3, {"note": "kept"})
        session.forward_backward(text(), loss)
        session.optim_step(lr=1e-2)
        assert session.weight_digest() != digest
        assert session.load() == ({"note": "kept"}, [])
        assert session.weight_digest() == digest
        session.export_hf(tmp_path / "export")
        assert (tmp_path / "export/model.safetensors").is_file()
        for verb in (session.push, session.publish, lambda: session.sample([])):
            with pytest.raises(ConfigError, match="no generators; set generator"):
                verb()
        session.forward_backward(text(), loss)
        session.optim_step(lr=1e-2)
    assert_nothing_left(session, started)


def test_a_lost_trainer_is_raised_by_every_later_call():
    session = rl.Session(config(generator=None)).blocking().open()
    started = pids(session._session)
    os.kill(started[0], signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(RankLost, match="trainer rank 0"):
            session.forward(text())
    with pytest.raises(RankLost, match="trainer rank 0"):
        session.close()
    assert_nothing_left(session, started)


@pytest.mark.long
def test_sampling_needs_no_trainer():
    with rl.Session(config(trainer=None), task=TASK.config).blocking() as session:
        started = pids(session._session)
        rollouts = session.rollout(TASK, PROMPTS, samples=2, max_tokens=6)
        assert len(rollouts) == 8
        assert {*session.generator_versions.values()} == {0}
        with pytest.raises(ConfigError, match="trains no policy; set trainer"):
            session.optim_step()
    assert_nothing_left(session, started)


def test_folders_may_be_text(tmp_path):
    with rl.Session(config(generator=None), folder=f"{tmp_path}/session").blocking() as session:
        before = session.weight_digest()
        session.save_weights(f"{tmp_path}/weights")
        session.forward_backward(text(), rl.losses.CrossEntropyLoss.Config())
        session.optim_step(lr=1e-2)
        assert session.weight_digest() != before
        session.load_weights(f"{tmp_path}/weights")
        assert session.weight_digest() == before
        assert (tmp_path / "session" / "logs").is_dir()
