"""The program: the scores of a run's checkpoint on held-out prompts.

Exit codes: 0 done, 1 failed, 2 the arguments cannot work, 128 + n ended by signal n.
"""

import json
import sys
from collections.abc import Sequence

from rl.errors import end_program, require
from rl.observe.record import finite
from rl.saved_run import exit_code_of, make_parser, open_run, run_session
from rl.session.session import Session
from rl.trainers.evaluation import Evaluation, held_out_prompts
from rl.trainers.scheduler import sampling_of
from rl.trainers.start import build_task

PROGRAM = "python -m rl.evaluate"
DESCRIPTION = """\
Evaluate a checkpoint of a run on held-out prompts, as the run itself does. The
scores of a deterministic pipeline are those that the run writes for that step.

  python -m rl.evaluate runs/first
  python -m rl.evaluate runs/first --step 100 --prompts 1000 --samples 8"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate a checkpoint; returns the exit code."""
    return exit_code_of(lambda: _evaluate(arguments))


def _evaluate(arguments: Sequence[str] | None) -> None:
    parser = make_parser(PROGRAM, DESCRIPTION)
    parser.add_argument("--prompts", metavar="P", help="number of held-out prompts")
    parser.add_argument("--samples", metavar="K", help="completions per prompt, for pass@K")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    own, overrides = parser.parse_known_args(arguments)
    for name in ("prompts", "samples"):
        if (given := getattr(own, name)) is not None:
            overrides += [f"--evaluation.{name}", given]
    run = open_run(own.run, own.step, overrides, program=PROGRAM)
    config = run.config
    require(
        config.evaluation.prompts > 0, "evaluation.prompts is 0; add --prompts P with P above 0"
    )
    session_config = run.session_config(config.generator)
    task = build_task(config)

    async def evaluate(session: Session) -> dict[str, float]:
        # the folder is for evaluations that training leaves behind
        prompts = held_out_prompts(config.evaluation, task)
        sampling = sampling_of(config.rollout, task)
        unused = session.folder / "unevaluated"
        return await Evaluation(config, prompts, sampling, session, unused).scores()

    scores = run_session(session_config, config.task, evaluate)
    row = {"run": str(own.run), "step": run.step, **scores}
    if own.json:
        print(json.dumps(finite(row)))
    else:
        print("\n".join(f"{name:>18}  {value}" for name, value in row.items()))


if __name__ == "__main__":
    end_program(main(sys.argv[1:]))
