"""The program: scores of a run's checkpoint or of a Hugging Face model on held-out data.

Exit codes: 0 done, 1 failed, 2 the arguments cannot work, 128 + n ended by signal n.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rl.cli.help import run_parser, show_help, take_name
from rl.cli.program import as_program
from rl.errors import ConfigError, end_program, printable, require

if TYPE_CHECKING:
    from rl.cli.saved_run import SavedRun
    from rl.config import RLConfig
    from rl.session.session import Session

PROGRAM = "python -m rl.evaluate"
USAGE = """\
%(prog)s RUN [--step N] [--prompts P] [--samples K] [--json] [--FIELD VALUE ...]
       %(prog)s [DIR] --config NAME [--prompts P] [--samples K] [--json] [--FIELD VALUE ...]"""
DESCRIPTION = """\
Evaluate a checkpoint of a run on held-out prompts or examples, as the run
itself does. The scores are those that the run writes for that step, unless its
pipeline is asynchronous.

  python -m rl.evaluate runs/first
  python -m rl.evaluate runs/first --step 100 --prompts 1000 --samples 8

With --config, evaluate a Hugging Face model in the folder DIR, or without DIR
the weights that a run of the config starts from. The scores are those that a
run of the config writes for these weights. --config NAME --help lists fields.

  python -m rl.evaluate --config gsm8k_jsonl --model.hf_path DIR --task.path FILE
  python -m rl.evaluate runs/first/export --config runs/first/config.json

scores of a config with prompts:
  eval/exact_match   share of prompts whose greedy completion is correct
  eval/reward_mean   mean reward of the greedy completions
  eval/pass@K        share of prompts that at least one of K samples solves
  eval/mean@K        share of the K samples of all prompts that is correct
  eval/TASK/…        the same of each task of a mixture
  eval/prompts       number of prompts
  eval/lost          number of groups of completions whose reward failed
  eval/version_min, eval/version_max   policy versions that drew the tokens,
                     with --json

scores of a config with examples:
  eval/loss          mean loss of the validation examples
  eval/perplexity    its exponential, of supervised fine-tuning
  eval/rewards/accuracy, eval/rewards/margin, …   of preferences"""
ONE_GPU = """\
  --generator.nodes 0
  --generator.replicas 1
  --generator.tensor_parallel_degree 1
That is one GPU for a model. For a checkpoint, it is two GPUs: one for the trainer, one for
the generator. On one GPU, add
  --colocate all
  --rollout.max_staleness 0"""


@as_program
def main(arguments: list[str]) -> None:
    """Evaluate a checkpoint or a model."""
    name, rest = take_name(arguments)
    if name is not None:
        show_help(arguments, PROGRAM)
    parser = run_parser(
        PROGRAM, DESCRIPTION, ONE_GPU, takes_run=False, usage=USAGE, add_help=name is None
    )
    parser.add_argument(
        "--prompts", metavar="P", help="number of held-out prompts; by default the config's"
    )
    parser.add_argument(
        "--samples",
        metavar="K",
        help="samples per prompt, for pass@K; 0 is greedy alone; by default the config's",
    )
    options, overrides = parser.parse_known_args(rest)
    first = overrides[0] if overrides else "-"
    # a part is chosen as in trainer.lora:on
    is_option = first.startswith("-") or (":" in first and not Path(first).exists())
    folder = None if is_option else Path(overrides.pop(0))
    for option in ("prompts", "samples"):
        if (value := getattr(options, option)) is not None:
            overrides += [f"--evaluation.{option}", value]

    # these import torch, which --help does without
    from rl.actors import fork_server

    fork_server.start()
    from rl.config import RLConfig
    from rl.observe.progress import summary_text
    from rl.observe.record import finite

    run = _open(folder, name, options.step, overrides)
    config = run.config
    scores = _on_prompts(run, config) if isinstance(config, RLConfig) else _on_examples(run)
    if name is None:
        row = {"run": str(folder), "step": run.step, **scores}
    else:
        start = folder or config.trainer.checkpoint.initial_load_path or config.model.hf_path
        row = {"config": name, "model": str(start or "random weights"), **scores}
    print(json.dumps(finite(row)) if options.json else printable(summary_text(row)))


def _open(folder: Path | None, name: str | None, step: int | None, rest: list[str]) -> "SavedRun":
    """Return the checkpoint ``step`` of the run in ``folder``, or with the name of a config the
    model in ``folder``.
    """
    from rl.cli.saved_run import is_model, open_model, open_run

    if name is not None:
        require(step is None, f"--step {step} is of a run; leave out --config or --step")
        return open_model(folder, name, rest, program=PROGRAM)
    if folder is None:
        raise ConfigError(
            f"name the folder of a run, as in {PROGRAM} RUN, or a config, whose task evaluates a "
            f"model: {PROGRAM} DIR --config NAME"
        )
    require(
        not is_model(folder),
        f"{folder} holds a Hugging Face model and no task to evaluate it on; add --config NAME, "
        f"for example {PROGRAM} {folder} --config gsm8k_jsonl --task.path FILE",
    )
    return open_run(folder, step, rest, program=PROGRAM)


def _on_prompts(run: "SavedRun", config: "RLConfig") -> dict[str, float]:
    """Return the scores of completions of held-out prompts."""
    from rl.cli.saved_run import run_session
    from rl.trainers.evaluation import Evaluation
    from rl.trainers.trial import build_task

    require(
        config.evaluation.prompts > 0, "evaluation.prompts is 0; add --prompts P with P above 0"
    )
    session_config = run.session_config(evaluates=True)
    task = build_task(config)

    async def evaluate(session: "Session") -> dict[str, float]:
        return await Evaluation(config, task, session).scores()

    return run_session(session_config, config.task, evaluate)


def _on_examples(run: "SavedRun") -> dict[str, float]:
    """Return the scores of validation examples."""
    from rl.cli.saved_run import run_session
    from rl.trainers.dataset import DatasetTrainer
    from rl.trainers.trainer import trainer_of

    session_config = run.session_config(evaluates=True)
    trainer = trainer_of(run.config)
    assert isinstance(trainer, DatasetTrainer), "other trainers have prompts"
    require(
        bool(trainer.dataset_eval),
        "no examples are held out; add --task.held_out_path FILE",
    )

    async def evaluate(session: "Session") -> dict[str, float]:
        trainer.run.attach(session)
        return await trainer.scores()

    return run_session(session_config, trainer.task, evaluate)


if __name__ == "__main__":
    end_program(main())
