"""One run: provision the meshes, train, and leave nothing behind."""

import asyncio
import os
import shlex
import signal
import time
import traceback
from pathlib import Path

from rl.actors.generator import GeneratorMesh
from rl.actors.group import Supervisor
from rl.actors.trainer import TrainerMesh
from rl.cli import parse_config
from rl.config import RunConfig, changed_fields, frozen
from rl.controller.loop import Controller
from rl.errors import EXIT_FAILED, EXIT_INTERRUPTED, ConfigError
from rl.launch.local import start_runtime, stop_runtime
from rl.observe.curves import reward_curve_text, write_curves_png
from rl.observe.progress import Progress
from rl.observe.record import RunRecord
from rl.platform import device_count
from rl.tasks.base import Task


def run(arguments: list[str], *, program: str) -> int:
    """Run the training that the command line asks for; returns the exit code.

    Raises ConfigError before anything has started, RunError where the run folder cannot be written.
    """
    name, config = parse_config(arguments, program=program)
    task: Task = config.data.build(seed=config.seed, model=config.model)
    folder = Path(config.output_dir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    _check_folder(folder, config)
    record = RunRecord(folder)
    command = f"{program} {shlex.join(arguments)}"
    resolved = frozen(config)
    changes = changed_fields(record.read_config()["config"], resolved) if config.resume else []
    changes = [change for change in changes if not change.startswith(("resume:", "quiet:", "output_dir:"))]
    record.write_config({"name": name, "command": command, "config": resolved})

    start_runtime(record.logs / "controller.log")
    with Progress(config.steps, quiet=config.quiet) as progress:
        progress.note(f"run folder: {folder}")
        for change in changes:
            progress.note(f"resuming with another {change}")
        outcome = asyncio.run(_supervised(config, task, record, progress, command))
    stop_runtime()
    if isinstance(outcome, int):
        return outcome
    _conclude(record, outcome, progress)
    return 0


async def _supervised(
    config: RunConfig, task: Task, record: RunRecord, progress: Progress, command: str
) -> dict[str, object] | int:
    """The summary, or the exit code of a run that ended early; in any case no process stays behind."""
    interrupts = _Interrupts()
    run = _Run(config, task, record, progress)
    try:
        return await run.run()
    except asyncio.CancelledError:
        progress.error(
            f"interrupted by {interrupts.name} after step {run.step}; {_how_to_go_on(config, record, command)}"
        )
        return interrupts.exit_code
    except Exception as error:
        progress.error(f"failed after step {run.step}: {error}\ndetails: {record.folder / 'failure.json'}")
        record.write_failure(
            {
                "error": str(error).splitlines()[0] if str(error) else type(error).__name__,
                "detail": str(error),
                "traceback": traceback.format_exc(),
                "step": run.step,
                "policy_version": run.policy_version,
                "command": command,
            }
        )
        return EXIT_FAILED
    finally:
        progress.stage("stopping")
        await run.stop()


class _Run:
    """The meshes of one run, and the controller over them."""

    def __init__(self, config: RunConfig, task: Task, record: RunRecord, progress: Progress):
        self._config, self._task, self._record, self._progress = config, task, record, progress
        self._supervisor = Supervisor()
        self._meshes: list[TrainerMesh | GeneratorMesh] = []
        self._controller: Controller | None = None

    @property
    def step(self) -> int:
        """Steps completed so far."""
        return self._controller.state.step if self._controller else 0

    @property
    def policy_version(self) -> int:
        """Version of the trainer's weights."""
        return self._controller.trainer.version if self._controller else 0

    async def run(self) -> dict[str, object]:
        """Start both meshes side by side, train, and close them; returns the summary."""
        config, folder = self._config, self._record.folder
        trainer_ranks, generator_ranks = config.trainer.ranks, config.generator.tensor_parallel_degree
        self._progress.stage(f"starting trainer ({trainer_ranks} ranks) and generator ({generator_ranks})")
        deadlines = {"start_deadline": config.deadlines.start, "deadline": config.deadlines.call}
        trainer = TrainerMesh(config.trainer, config.model, self._supervisor, folder=folder, **deadlines)
        generator = GeneratorMesh(config.generator, config.model, self._supervisor, folder=folder, **deadlines)
        self._meshes = [trainer, generator]
        share = trainer_ranks + generator_ranks > device_count()  # too few GPUs for both: they share the first ones
        await asyncio.gather(
            trainer.start(seed=config.seed, steps=config.steps),
            generator.start(seed=config.seed, first_device=0 if share else trainer_ranks),
        )
        self._controller = Controller(config, self._task, trainer, generator, self._record, self._progress)
        summary = await self._controller.run()
        self._supervisor.stop()
        for mesh in self._meshes:
            await mesh.close()
        return summary

    async def stop(self) -> None:
        """End every process of the run."""
        self._supervisor.stop()
        await asyncio.gather(*(mesh.stop() for mesh in self._meshes))


class _Interrupts:
    """The first SIGINT or SIGTERM cancels the run, which then stops its processes; the second leaves at once."""

    def __init__(self) -> None:
        self.name, self.exit_code = "", EXIT_INTERRUPTED
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._receive, number)

    def _receive(self, number: signal.Signals) -> None:
        if self.name:
            os._exit(self.exit_code)  # the processes of the run end with their parent
        self.name, self.exit_code = number.name, 128 + number
        self._task.cancel()


def _check_folder(folder: Path, config: RunConfig) -> None:
    holds_run = (folder / "config.json").exists()
    if holds_run and not config.resume:
        raise ConfigError(
            f"output_dir: {folder} already holds a run; add --resume to go on with it, or name another folder"
        )
    if config.resume and not holds_run:
        raise ConfigError(
            f"--resume: output_dir {str(folder)!r} holds no run; name the folder of the run to go on with"
        )


def _how_to_go_on(config: RunConfig, record: RunRecord, command: str) -> str:
    if not any((record.folder / config.trainer.checkpoint.folder).glob("step-*/.metadata")):
        return "no checkpoint was complete yet"
    folder = "" if config.output_dir else f" --output-dir {record.folder}"
    resume = "" if config.resume else " --resume"
    return f"go on with: {command}{folder}{resume}"


def _conclude(record: RunRecord, summary: dict[str, object], progress: Progress) -> None:
    rows = record.read_metrics()
    write_curves_png(record.folder / "curves.png", rows)
    record.write_summary(summary)
    progress.note(reward_curve_text(rows))
    progress.note("\n".join(f"{name:>18}  {value}" for name, value in summary.items()))
    progress.note(f"run folder: {record.folder}")
