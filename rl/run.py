"""One run: provision the meshes, train, and leave nothing behind."""

import asyncio
import gc
import os
import shlex
import signal
import traceback
from collections.abc import Coroutine
from pathlib import Path

from rl.actors.hosts import Hosts
from rl.actors.nodes import Nodes
from rl.actors.processes import start_runtime, stop_runtime
from rl.cli import parse_config, read_config_file
from rl.config import RunConfig
from rl.controller.dispatch import Dispatch
from rl.controller.loop import Controller
from rl.controller.start import build_task, check_algorithm
from rl.controller.together import beside
from rl.errors import EXIT_AGAIN, EXIT_FAILED, EXIT_INTERRUPTED, ActorFailure, NodeLost, end_program, require
from rl.frozen import changed_fields, frozen
from rl.meshes import Meshes
from rl.observe.curves import reward_curve_text, write_curves_png
from rl.observe.owner import FolderOwner, claim
from rl.observe.progress import Progress
from rl.observe.record import RunRecord
from rl.tasks.base import Task

NOTHING_LEARNED = (
    "every gradient was 0 or not finite, or the learning rate was 0; see trainer/grad_norm, trainer/skipped_steps and "
    "reward/flat_groups in metrics.jsonl"
)


def run(arguments: list[str], *, program: str) -> int:
    """Run the training that the command line asks for; returns the exit code.

    Raises ConfigError before anything has started, RunError if the run folder cannot be written or is in use.
    """
    name, config = parse_config(arguments, program=program)
    check_algorithm(config)
    task = build_task(config)
    attempt_on = os.environ.get("TILLER_NODES", "").split()
    _check_hosts(config, len(attempt_on) or 1)
    # The controller of the attempt before may live on: its node may be lost to the cluster only.
    wait_s = config.deadlines.start if attempt_on else 0.0
    with claim(name, config.output_dir, resume=config.resume, wait_s=wait_s) as owner:
        return _run(name, config, task, owner, f"{program} {shlex.join(arguments)}")


def _run(name: str, config: RunConfig, task: Task, owner: FolderOwner, command: str) -> int:
    folder = owner.folder
    logs = Path(os.environ.get("TILLER_LOGS") or folder / "logs")
    nodes = Nodes(logs / "workers")
    record = RunRecord(folder, logs, check=owner.check)
    resolved = frozen(config)
    changes = changed_fields(_config_before(folder), resolved) if config.resume else []
    changes = [change for change in changes if not change.startswith(("resume:", "quiet:", "output_dir:"))]
    record.write_config({"name": name, "command": command, "config": resolved})

    there = nodes.gather(config.nodes, config.deadlines.start)
    start_runtime(record.logs / "controller.log", nodes.own)
    hosts = Hosts(record.logs, there)
    with Progress(config.steps, quiet=config.quiet) as progress:
        progress.note(f"run folder: {folder}")
        for change in changes:
            progress.note(f"resuming with another {change}")
        gc.freeze()  # a full collection would go through all that was imported, and halt the loop for 0.3 s
        outcome = asyncio.run(_supervised(config, task, hosts, nodes.lost(there), record, progress, command))
    stop_runtime()
    if isinstance(outcome, int):
        return outcome
    _conclude(record, outcome, progress)
    if outcome["steps_learned"] == 0:
        error = f"none of {outcome['steps']} steps changed the weights: {NOTHING_LEARNED}"
        record.write_failure({"error": error, "step": outcome["steps"], "command": command})
        progress.error(error)
        return EXIT_FAILED
    return 0


def _config_before(folder: Path) -> dict[str, object]:
    """Return the frozen config of the attempt before."""
    path = folder / "config.json"
    return read_config_file(path, f"--resume: {path}")["config"]


async def _supervised(
    config: RunConfig,
    task: Task,
    hosts: Hosts,
    node_lost: Coroutine[None, None, None],
    record: RunRecord,
    progress: Progress,
    command: str,
) -> dict[str, object] | int:
    """The summary, or the exit code of a run that ended early; in any case no process stays behind."""
    meshes = Meshes(config, hosts, record.folder, progress.warn)
    controller = Controller(
        config, task, Dispatch(meshes.models, meshes.shared), meshes.generator, meshes.rewards, record, progress
    )
    interrupts = _Interrupts(controller)
    try:
        progress.stage(meshes.describe())
        async with beside(node_lost):
            summary = await controller.run()
        await meshes.close()  # which waits for a save that is still being written
        if summary is not None:
            return summary
    except asyncio.CancelledError:
        pass  # interrupted before there was anything to finish
    except Exception as error:
        failure = _failure(error, controller) | {"command": command}
        versions = f"trainer {failure['policy_version']}, generators {failure['generator_versions']}"
        progress.error(
            f"failed after step {controller.step}: {error}\npolicy versions: {versions}\n"
            f"details: {record.folder / 'failure.json'}\ncommand: {command}"
        )
        record.write_failure(failure)
        if isinstance(error, NodeLost):
            end_program(EXIT_AGAIN)  # its ranks will not answer; who started the workers ends the others
        return EXIT_FAILED
    finally:
        progress.stage("stopping")
        await meshes.stop()
        await hosts.shut_down()
    progress.error(
        f"interrupted by {interrupts.name} after step {controller.step}; {_how_to_go_on(config, record, command)}"
    )
    return interrupts.exit_code


class _Interrupts:
    """The first signal has the run finish its step, save and leave; a second Ctrl-C leaves at once."""

    def __init__(self, controller: Controller) -> None:
        self.name, self.exit_code = "", EXIT_INTERRUPTED
        self._controller, self._task = controller, asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            asyncio.get_running_loop().add_signal_handler(number, self._receive, number)

    def _receive(self, number: signal.Signals) -> None:
        if self.name and number == signal.SIGINT:
            os._exit(EXIT_INTERRUPTED)  # the processes of the run end with their parent
        if self.name:
            return
        self.name = number.name
        self.exit_code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_AGAIN
        if self._controller.is_training:
            self._controller.leave()
        elif self._task is not None:
            self._task.cancel()


def _failure(error: Exception, controller: Controller) -> dict[str, object]:
    """What ``failure.json`` says of the first cause."""
    first = error if isinstance(error, ActorFailure) else error.__cause__
    named = {"actor": first.actor, "rank": first.rank, "call": first.call} if isinstance(first, ActorFailure) else {}
    return {
        "error": str(error).splitlines()[0] if str(error) else type(error).__name__,
        **named,
        "step": controller.step,
        "policy_version": controller.version,
        "generator_versions": {mesh.name: mesh.version for mesh in controller.fleet.meshes},
        "ledger": controller.ledger.counts(),
        "detail": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }


def _check_hosts(config: RunConfig, there: int) -> None:
    """Raise ConfigError unless this, with so many nodes, is where the config is to run."""
    config.hardware.require_here()
    require(
        config.nodes <= there,
        f"trainer.nodes={config.trainer.nodes} and generator.nodes={config.generator.nodes} need {config.nodes} nodes; "
        f"this run has {there}: start it by python -m rl.launch slurm, or give --trainer.nodes 1 --generator.nodes 0",
    )


def _how_to_go_on(config: RunConfig, record: RunRecord, command: str) -> str:
    if not any((record.folder / config.trainer.checkpoint.folder).glob("step-*/.metadata")):
        return "no checkpoint was complete yet"
    folder = "" if config.output_dir else f" --output-dir {record.folder}"
    resume = "" if config.resume else " --resume"
    return f"go on with: {command}{folder}{resume}"


def _conclude(record: RunRecord, summary: dict[str, object], progress: Progress) -> None:
    rows = record.read_metrics()
    write_curves_png(record.folder / "curves.png", rows, record.read_evaluations())
    record.write_summary(summary)
    progress.note(reward_curve_text(rows))
    progress.note("\n".join(f"{name:>18}  {value}" for name, value in summary.items()))
    progress.note(f"run folder: {record.folder}")
