"""The program: the scores of a run's checkpoint on held-out data.

Exit codes: 0 done, 1 failed, 2 the arguments cannot work, 128 + n ended by signal n.
"""

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl.errors import end_program, require
from rl.help import run_parser
from rl.program import exit_code

if TYPE_CHECKING:
    from rl.config import RLConfig
    from rl.saved_run import SavedRun
    from rl.session.session import Session

PROGRAM = "python -m rl.evaluate"
DESCRIPTION = """\
Evaluate a checkpoint of a run on held-out prompts or examples, as the run
itself does. The scores are those that the run writes for that step, unless its
pipeline is asynchronous.

  python -m rl.evaluate runs/first
  python -m rl.evaluate runs/first --step 100 --prompts 1000 --samples 8

scores of an RL run:
  eval/exact_match   share of prompts whose greedy completion is correct
  eval/reward_mean   mean reward of the greedy completions
  eval/pass@K        share of prompts that at least one of K samples solves
  eval/prompts       number of prompts
  eval/lost          number of groups of completions whose reward failed
  eval/version_min, eval/version_max   policy versions that drew the tokens

scores of other runs:
  eval/loss          mean loss of the validation examples
  eval/perplexity    its exponential, of supervised fine-tuning
  eval/rewards/accuracy, eval/rewards/margin, …   of preferences"""
ONE_GPU = """\
  --generator.nodes 0
  --generator.replicas 1
  --generator.tensor_parallel_degree 1
That is two GPUs: one for the trainer, one for the generator. On one GPU, add
  --colocate all
  --rollout.max_staleness 0
  --generator.enforce_eager"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate a checkpoint; returns the exit code."""
    return exit_code(lambda: _evaluate(arguments))


def _evaluate(arguments: Sequence[str] | None) -> None:
    parser = run_parser(PROGRAM, DESCRIPTION, ONE_GPU)
    parser.add_argument(
        "--prompts", metavar="P", help="number of held-out prompts of an RL run; by default its own"
    )
    parser.add_argument(
        "--samples",
        metavar="K",
        help="samples per prompt of an RL run, for pass@K; 0 is greedy alone; by default its own",
    )
    own, overrides = parser.parse_known_args(arguments)
    for name in ("prompts", "samples"):
        if (given := getattr(own, name)) is not None:
            overrides += [f"--evaluation.{name}", given]

    # these import torch, which --help does without
    from rl.actors import fork_server

    fork_server.start()
    from rl.config import RLConfig
    from rl.observe.record import finite
    from rl.saved_run import open_run

    run = open_run(own.run, own.step, overrides, program=PROGRAM)
    config = run.config
    scores = _on_prompts(run, config) if isinstance(config, RLConfig) else _on_examples(run)
    row = {"run": str(own.run), "step": run.step, **scores}
    if own.json:
        print(json.dumps(finite(row)))
    else:
        print("\n".join(f"{name:>18}  {value}" for name, value in row.items()))


def _on_prompts(run: "SavedRun", config: "RLConfig") -> dict[str, float]:
    """Return the scores of completions of held-out prompts."""
    from rl.saved_run import run_session
    from rl.trainers.evaluation import Evaluation, held_out_prompts
    from rl.trainers.scheduler import sampling_of
    from rl.trainers.start import build_task

    require(
        config.evaluation.prompts > 0, "evaluation.prompts is 0; add --prompts P with P above 0"
    )
    session_config = run.session_config(evaluates=True)
    task = build_task(config)

    async def evaluate(session: "Session") -> dict[str, float]:
        # the folder is for evaluations that training leaves behind
        prompts = held_out_prompts(config.evaluation, task)
        sampling = sampling_of(config.rollout, task)
        unused = session.folder / "unevaluated"
        return await Evaluation(config, prompts, sampling, session, unused).scores()

    return run_session(session_config, config.task, evaluate)


def _on_examples(run: "SavedRun") -> dict[str, float]:
    """Return the scores of validation examples."""
    from rl.saved_run import run_session
    from rl.trainers.dataset import DatasetTrainer
    from rl.trainers.trainer import trainer_of

    session_config = run.session_config(evaluates=True)
    trainer = trainer_of(run.config)
    assert isinstance(trainer, DatasetTrainer), "other trainers have prompts"
    require(
        bool(trainer.dataset_eval),
        "the run held out no examples; add --task.held_out_path FILE",
    )
    return run_session(session_config, trainer.task, trainer.scores_in)


if __name__ == "__main__":
    end_program(main(sys.argv[1:]))
