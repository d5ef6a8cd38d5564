"""One run: open a session, train, and leave nothing behind."""

import asyncio
import gc
import os
import shlex
from collections.abc import Coroutine
from pathlib import Path

from rl.actors.hosts import Hosts
from rl.actors.nodes import Nodes
from rl.actors.processes import start_runtime, stop_runtime
from rl.cli import parse_config, read_config_file
from rl.config import RLConfig
from rl.endings import GoingOn, Interrupts, fail
from rl.errors import ConfigError, NodeLost, RunError, end_program, require, said_by
from rl.frozen import changed_fields, frozen
from rl.observe.curves import write_curves_png
from rl.observe.owner import FolderOwner, claim
from rl.observe.progress import Progress
from rl.observe.record import RunRecord
from rl.roles import session_config
from rl.session.concurrency import background
from rl.session.session import Session
from rl.tasks.base import Task
from rl.trainers.loop import RLTrainer
from rl.trainers.start import build_task, check_algorithm

NOTHING_LEARNED = (
    "every gradient was 0 or not finite, or the learning rate was 0; see trainer/grad_norm, "
    "trainer/skipped_steps and reward/zero_std_groups in metrics.jsonl"
)


def run(arguments: list[str], *, program: str) -> int:
    """Run the training that the command line asks for; returns the exit code.

    Raises ConfigError before anything has started, RunError if the run folder cannot be written or
    is in use.
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


def _run(name: str, config: RLConfig, task: Task, owner: FolderOwner, command: str) -> int:
    record = RunRecord(owner.folder, os.environ.get("TILLER_LOGS", ""), check=owner.check)
    progress = Progress(config.steps, quiet=config.quiet, log=record.run_log)
    going_on = GoingOn(config, record.folder, command)
    try:
        resolved = frozen(config)
        changes = changed_fields(_config_before(record.folder), resolved) if config.resume else []
        record.write_config({"name": name, "command": command, "config": resolved})
        nodes = Nodes(record.logs / "workers")
        there = nodes.gather(config.nodes, config.deadlines.start)
        start_runtime(record.logs / "controller.log", nodes.own)
        hosts = Hosts(record.logs, there)
        with progress:
            progress.note(f"run folder: {record.folder}")
            for change in changes:
                if not change.startswith(("resume:", "quiet:", "output_dir:")):
                    progress.note(f"resuming with another {change}")
            # a full collection would go through all that was imported, and halt the loop for 0.3 s
            gc.freeze()
            outcome = asyncio.run(
                _supervised(config, task, hosts, nodes.lost(there), record, progress, going_on)
            )
        stop_runtime()
        if isinstance(outcome, int):
            return outcome
        _conclude(record, outcome, progress)
        if outcome["steps_learned"] == 0:
            raise RunError(
                f"none of {outcome['steps']} steps changed the weights: {NOTHING_LEARNED}"
            )
        return 0
    except ConfigError:
        raise
    except (
        Exception,
        SystemExit,
        KeyboardInterrupt,
    ) as error:  # the last two from the user's own code
        return fail(error, None, record, progress, going_on)


def _config_before(folder: Path) -> dict[str, object]:
    """Return the frozen config of the attempt before."""
    path = folder / "config.json"
    return read_config_file(path, f"--resume: {path}")["config"]


async def _supervised(
    config: RLConfig,
    task: Task,
    hosts: Hosts,
    node_lost: Coroutine[None, None, None],
    record: RunRecord,
    progress: Progress,
    going_on: GoingOn,
) -> dict[str, object] | int:
    """Return the summary, or the exit code of a run that ended early; leaves no process behind."""
    session = Session(
        session_config(config),
        task=config.task,
        folder=record.folder,
        hosts=hosts,
        warn=progress.warn,
    )
    trainer = RLTrainer(config, task, session, record, progress)
    interrupts = Interrupts(trainer, progress, going_on)
    try:
        progress.stage(session.describe())
        async with background(node_lost):
            summary = await trainer.run()
        await session.close()  # which waits for a save that is still being written
        if summary is not None:
            return summary
    except asyncio.CancelledError:
        if not interrupts.name:
            raise  # the loop ends, by an exception that is no Exception
    except Exception as error:
        code = fail(error, trainer, record, progress, going_on)
        if isinstance(error, NodeLost):
            end_program(code)  # its ranks will not answer; who started the workers ends the others
        return code
    finally:
        progress.stage("stopping")
        await session.stop()
        await hosts.shut_down()
    progress.error(f"interrupted by {interrupts.name} after step {trainer.step}; {going_on}")
    return interrupts.exit_code


def _check_hosts(config: RLConfig, there: int) -> None:
    """Raise ConfigError unless this, with so many nodes, is where the config is to run."""
    config.hardware.require_here()
    require(
        config.nodes <= there,
        f"trainer.nodes={config.trainer.nodes} and generator.nodes={config.generator.nodes} need "
        f"{config.nodes} nodes; this run has {there}: start it by python -m rl.launch slurm, or "
        "give --trainer.nodes 1 --generator.nodes 0",
    )


def _conclude(record: RunRecord, summary: dict[str, object], progress: Progress) -> None:
    record.write_summary(summary)
    rows = record.read_metrics()
    try:
        write_curves_png(record.folder / "curves.png", rows, record.read_evaluations())
    except Exception as error:  # a picture is no reason to fail a finished run
        progress.warn(f"no curves.png: {said_by(error)}")
    progress.note("\n".join(f"{name:>18}  {value}" for name, value in summary.items()))
    progress.note(f"run folder: {record.folder}")
