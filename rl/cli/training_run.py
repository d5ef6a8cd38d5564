"""Program of one run: train, then end all processes."""

import asyncio
import gc
import os
import shlex
from typing import Any

from rich.console import Console

from rl.cli.arguments import read_config
from rl.errors import ConfigError, Interrupted, NodeLost, end_program
from rl.trainers.endings import Interrupts, fail
from rl.trainers.run_folder import RunFolder
from rl.trainers.trainer import Trainer, trainer_of


def run(arguments: list[str], *, program: str) -> int:
    """Run the training that the command line asks for; return the exit code.

    Raises ConfigError before anything has started, RunError if the run folder cannot be written or
    is in use.
    """
    name, config = read_config(arguments, program=program)
    trainer = trainer_of(config)  # which validates the config
    config.require_hosts(len(os.environ.get("TILLER_NODES", "").split()) or 1)
    trainer.session_config.fetch_models(Console(quiet=config.quiet, soft_wrap=True).print)
    folder = trainer.run.claim(name, f"{program} {shlex.join(arguments)}")
    try:
        # a full garbage collection would visit all imported objects and stop the loop for 0.3 s
        gc.freeze()
        return asyncio.run(_supervised(trainer, folder))
    except ConfigError:
        raise
    # the user's own code may raise the last two
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return fail(error, folder)
    finally:
        folder.release()


async def _supervised(trainer: Trainer[Any], folder: RunFolder) -> int:
    """Train and return the exit code; leave no process behind."""
    with Interrupts(trainer.run) as interrupts:
        try:
            await interrupts.train()
            folder.progress.stage("stopping")
            await trainer.run.end()  # waits for a save in progress
        except Interrupted as error:
            folder.progress.stage("stopping")
            await trainer.run.end()
            folder.progress.error(str(error))
            return error.exit_code
        except Exception as error:
            code = fail(error, folder, trainer.run)
            if isinstance(error, NodeLost) and trainer.run.is_open:
                end_program(code)  # the node's ranks cannot answer; the launcher ends the others
            return code
        finally:
            await trainer.run.end(at_once=True)
    return 0
