"""Saved weights in a session of their own; the folders of the weights are only read."""

import asyncio
import contextlib
import json
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rl.cli.arguments import parse_config, read_config
from rl.config import RLConfig, RunConfig
from rl.environments.task import Task
from rl.errors import Interrupted, end_program, require
from rl.host.process import Signals
from rl.observe.checkpoint_folders import StepFolders
from rl.session.session import Session
from rl.session.session_config import SessionConfig
from rl.training.start_weights import Start
from rl.validation import validate
from rl.validation.folders import validate_start

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class SavedRun:
    """Weights that were saved, and the config of a run that trains them."""

    config: RunConfig
    step: int = 0
    """Number of steps completed at the checkpoint; 0 for the start of a run."""
    weights: Path | None = None
    """Folder of a checkpoint or of a Hugging Face model; None for the weights that a run of
    ``config`` starts from."""

    def session_config(self, *, evaluates: bool = False) -> SessionConfig:
        """Return a session that loads the weights and saves nothing.

        - With ``evaluates``, it has generators. The trained model is among its models, unless
          the config is an RLConfig whose generators can load the weights themselves.
        - With ``evaluates``, a config that is not an RLConfig has the models beside the policy, the
          reference of DPO for example.
        - Without, it has the trained model alone.

        Raises ConfigError if this host alone cannot hold it.
        """
        config = self.config
        session = config.session()
        generator = session.generator if evaluates else None
        nodes = 0 if generator is None else generator.nodes
        checkpoint = config.trainer.checkpoint
        path = self.weights or checkpoint.initial_load_path
        in_hf = is_model(self.weights) if self.weights else checkpoint.initial_load_in_hf
        if evaluates and isinstance(config, RLConfig) and (in_hf or not path):
            require_one_host(config, generator_nodes=nodes)
            start = Start(folder=str(path) if path else None, dtype=config.trainer.training.dtype)
            return replace(session, trainer=None, roles={}, generator=generator, start=start)
        require_one_host(config, trainer_nodes=config.trainer.nodes, generator_nodes=nodes)
        checkpoint = replace(checkpoint, load_only=True)
        if self.weights is not None:
            checkpoint = replace(
                checkpoint,
                initial_load_path=str(self.weights),
                initial_load_model_only=in_hf,  # the policy version is not part of the model
                initial_load_in_hf=in_hf,
                initial_load_in_hf_quantized=False,
            )
        trainer = replace(config.trainer, checkpoint=checkpoint)
        roles = session.roles if evaluates and not isinstance(config, RLConfig) else {}
        return replace(session, trainer=trainer, roles=roles, generator=generator)


def require_one_host(
    config: RunConfig, *, trainer_nodes: int = 1, generator_nodes: int = 0
) -> None:
    """Raise ConfigError unless this host alone can hold the trainer and generators, which ask for
    these numbers of nodes.
    """
    config.hardware.require_here()
    for name, nodes, here in (("trainer", trainer_nodes, 1), ("generator", generator_nodes, 0)):
        require(
            nodes == here,
            f"{name}.nodes is {nodes}, and this program runs on one host; add --{name}.nodes "
            f"{here} and a layout that fits on this host",
        )


def read_run(folder: Path, overrides: list[str], *, program: str) -> RunConfig:
    """Return the config of the run in ``folder``, with ``overrides``.

    Raises ConfigError if the folder holds no run.
    """
    path = folder / "config.json"
    require(
        path.is_file(),
        f"{folder} is not the folder of a run, which has a config.json; name a folder that "
        "python -m rl.train wrote",
    )
    return parse_config(["--config", str(path), *overrides], program=program)[1]


def open_run(
    folder: Path, step: int | str | None, overrides: list[str], *, program: str
) -> SavedRun:
    """Return checkpoint ``step`` of the run in ``folder``, ``best`` for the best one; the newest
    complete one if None.

    Raises ConfigError if the run or the checkpoint does not exist.
    """
    config = read_run(folder, overrides, program=program)
    checkpoints = StepFolders(folder.resolve() / config.trainer.checkpoint.folder)
    complete = checkpoints.complete()
    require(
        bool(complete),
        f"{checkpoints.folder} has no complete checkpoint; wait until the run has saved one",
    )
    if step == "best":
        step = next(iter(checkpoints.best()), None)
        problem = f"--step best: {checkpoints.folder} has no best checkpoint; set best.metric"
        require(step is not None, problem)
    chosen = complete[-1] if step is None else int(step)
    require(
        chosen in complete,
        f"--step {chosen}: {checkpoints.folder} has no such complete checkpoint; it has those of "
        f"the steps {', '.join(map(str, complete))}",
    )
    return SavedRun(config, chosen, checkpoints.path(chosen))


def is_model(folder: Path) -> bool:
    """Whether ``folder`` holds the ``config.json`` of a Hugging Face model."""
    try:
        content = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and not {"architectures", "model_type"}.isdisjoint(content)


def open_model(folder: Path | None, name: str, overrides: list[str], *, program: str) -> SavedRun:
    """Return the Hugging Face model in ``folder``, as the policy of config ``name``; without a
    folder, the weights that a run of the config starts from.

    The folder is also ``model.hf_path`` if the config sets none. Raises ConfigError if the config
    cannot work or is that of another model.
    """
    _, config = read_config(["--config", name, *overrides], program=program)
    if folder is None:
        validate(config)
        return SavedRun(config)
    require(
        is_model(folder),
        f"{folder} is not the folder of a Hugging Face model, whose config.json has a model_type; "
        "the checkpoints of a run need no --config: name the folder of the run alone",
    )
    if config.model.hf_path is None:
        config.model.hf_path = str(folder)
    validate(config)
    validate_start("DIR", str(folder), config)
    return SavedRun(config, weights=folder.resolve())


def run_session(
    config: SessionConfig,
    task: Task.Config | None,
    work: Callable[[Session], Awaitable[Result]],
    *,
    folder: Path | None = None,
    opens: bool = True,
) -> Result:
    """Start a session and return the result of ``work(session)``, which starts the session itself
    unless ``opens``. The processes of the session are gone when this call returns. Its files are in
    ``folder``, by default one that is gone too.

    Raises Interrupted after Ctrl-C and other signals.
    """
    return asyncio.run(_interruptible(Session(config, task=task, folder=folder), work, opens))


async def _interruptible(
    session: Session, work: Callable[[Session], Awaitable[Result]], opens: bool
) -> Result:
    task = asyncio.current_task()
    assert task is not None, "this is a coroutine"
    if not opens:  # a session that is opened here says so itself
        print(session.describe(), flush=True)
    # after a second signal, the processes of the session end with their parent
    with Signals(first=task.cancel, again=lambda number: end_program(128 + number)) as signals:
        try:
            async with session if opens else contextlib.nullcontext():
                return await work(session)
        except BaseException:
            if not signals.name:
                raise
            error = Interrupted(f"interrupted by {signals.name}")
            error.exit_code = 128 + signal.Signals[signals.name]
            raise error from None
        finally:
            if not opens:
                await session.stop()
