"""The program: a checkpoint of a run as a Hugging Face folder.

Exit codes: 0 done, 1 failed, 2 the arguments cannot work, 128 + n ended by signal n.
"""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rl.cli.help import run_parser
from rl.cli.program import as_program
from rl.errors import ConfigError, end_program, require, require_value

if TYPE_CHECKING:
    from rl.cli.saved_run import SavedRun
    from rl.model.updates import Update
    from rl.session.session import Session

PROGRAM = "python -m rl.export"
DESCRIPTION = """\
Write a checkpoint of a run as a Hugging Face folder, for transformers and vLLM:
config.json, safetensors and the tokenizer, as in the run's own export/. Weights
have the dtype of the model that the run started from, float32 from random
weights. bfloat16 rounds small updates away; --dtype float32 keeps them. LoRA is
merged into the weights, and written in adapter/ for PEFT too. --average 3 writes
the mean of the weights of three checkpoints, the last of which is that of --step.

  python -m rl.export runs/first exported --dtype float32
  python -m rl.export runs/first --step 100 exported
  python -m rl.export runs/first exported --average 3"""
ONE_GPU = "That is one GPU."


@as_program
def main(arguments: list[str]) -> None:
    """Export a checkpoint."""
    parser = run_parser(PROGRAM, DESCRIPTION, ONE_GPU)
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder to write, new or empty")
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=dtypes, default="", help="dtype of the weights")
    parser.add_argument(
        "--average", metavar="K", type=int, default=1, help="number of checkpoints to average"
    )
    options, overrides = parser.parse_known_args(arguments)

    # these import torch, which --help does without
    from rl.actors import fork_server

    fork_server.start()
    from rl.cli.saved_run import open_run, run_session
    from rl.config import RLConfig
    from rl.host.disk import TemporaryFolder, replace_folder
    from rl.trainers.trial import build_task
    from rl.training.averages import write_average

    folder = options.folder.resolve()
    require(
        not folder.exists() or (folder.is_dir() and not any(folder.iterdir())),
        f"{folder} exists and is not an empty folder; name another DIR, or remove it first",
    )
    run = open_run(options.run, options.step, overrides, program=PROGRAM)
    averaged = _averaged(run, options.average)
    steps = [*averaged]
    config = run.session_config()
    task = build_task(run.config) if isinstance(run.config, RLConfig) else None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"{folder.parent} cannot be made: {error.strerror}; name another DIR"
        raise ConfigError(problem) from error
    with TemporaryFolder(f".{folder.name}-", folder.parent) as written:
        model = Path(written) / "model"
        mean = Path(written) / "average"
        if options.average > 1:
            write_average([*averaged.values()], mean)
        write = partial(_export, run=run, model=model, mean=mean, dtype=options.dtype)
        update, digest = run_session(config, None, write)
        if task is not None:
            task.describe(model)
        replace_folder(folder, model)
    shares = {"changed": update.changed / max(update.weights, 1), "kept": update.share}
    row = {"run": str(options.run), "step": run.step, "folder": str(options.folder), **shares}
    row |= {"averaged": steps} if options.average > 1 else {}
    which = f"step {run.step}" if options.average == 1 else f"the mean of steps {steps}"
    text = f"exported {which} of {options.run} to {options.folder}, policy digest {digest}"
    said = "\n".join(filter(None, (text, update.describe())))
    print(json.dumps(row | {"policy_digest": digest}) if options.json else said)


async def _export(
    session: "Session", *, run: "SavedRun", model: Path, mean: Path, dtype: str
) -> tuple["Update", str]:
    """Write the folder ``model`` of the session's weights, or of ``mean`` if it exists. Return what
    the dtype keeps of the update, and the digest of the weights.
    """
    from rl.config import DatasetRunConfig
    from rl.model.reward_model import describe_stops
    from rl.training.lora import base_of, rename_base

    if mean.exists():
        await session.load_weights(mean)
    update = await session.export_hf(model, dtype=dtype)
    start = run.config.trainer.checkpoint
    if start.initial_load_path and (model / "adapter").exists():
        rename_base(model / "adapter", base_of(start, run.config.model.hf_path))
    if isinstance(run.config, DatasetRunConfig):
        state, _ = await session.load()
        describe_stops(model, state.get("stop_token_ids", []))
    return update, await session.weight_digest()


def _averaged(run: "SavedRun", count: int) -> dict[int, Path]:
    """Return the last ``count`` checkpoints up to that of ``run``, by step. Raises ConfigError if
    there are fewer, or if their mean is not a model.
    """
    from rl.observe.checkpoint_folders import StepFolders

    assert run.weights is not None, "a run has checkpoints"
    checkpoints = StepFolders(run.weights.parent)
    steps = [step for step in checkpoints.complete() if step <= run.step]
    chosen = {step: checkpoints.path(step) for step in steps[-max(count, 0) :]}
    rule = f"from 1 to {len(steps)}, the number of complete checkpoints up to --step"
    require_value(len(chosen) == count, "--average", count, rule)
    rule = "1 for a run with trainer.lora: the mean of factors is not the factor of a mean"
    require_value(count == 1 or run.config.trainer.lora is None, "--average", count, rule)
    return chosen


if __name__ == "__main__":
    end_program(main())
