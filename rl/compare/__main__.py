"""The program: a generator against the trainer of a run, module by module.

Exit codes: 0 equal beyond rounding, 1 different or failed, 2 the arguments cannot work, 128 + n
ended by signal n.
"""

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rl.cli.program import as_program, reader_of_a_run
from rl.errors import ConfigError, end_program, require

if TYPE_CHECKING:
    from rl.compare.comparison import Compared, Example
    from rl.config import RLConfig
    from rl.model.activations import Activations
    from rl.replay.replay import RolloutReplay
    from rl.session.session import Session

PROGRAM = "python -m rl.compare"
DESCRIPTION = """\
Find the module in which a run's generator and trainer begin to differ. Both get
the weights before step K and the tokens of a rollout of that step. The program
compares their weights, then the output of each module in the order of
execution, then log-probs, cached prefixes after a push, and the recorded
log-probs. It names the first difference that rounding does not explain.

  python -m rl.compare runs/first --step 120
  python -m rl.compare runs/first --step 120 --rollout 7

Instead of the generator, the trainer in another layout:

  python -m rl.compare runs/first --step 120 --under fsdp2-tp2"""
EPILOG = """\
The run folder is only read. Any field of the run's config can be given after
these arguments, with the names that python -m rl.train takes.

exit codes: 0 equal beyond rounding, 1 different or failed, 2 the arguments
cannot work, 130 Ctrl-C"""
SHOWN_TOKENS = 5
CP = "context_parallel_degree"


@as_program
def main(arguments: list[str]) -> int:
    """Compare two sides of a run."""
    options, overrides = _parser().parse_known_args(arguments)
    require(options.step >= 1, f"--step is {options.step}; it must be at least 1")

    # these import torch, which --help does without
    from rl.actors import fork_server

    fork_server.start()
    from rl.cli.saved_run import read_run, require_one_host
    from rl.compare.comparison import examples_of
    from rl.config import RLConfig
    from rl.replay.replay import RolloutReplay
    from rl.training.trainer_config import degrees_of

    layout = {} if options.under is None else degrees_of(options.under, option="--under")
    config = read_run(options.run, overrides, program=PROGRAM)
    if not isinstance(config, RLConfig):
        raise ConfigError(f"{options.run} is not an RL run; other runs record no rollouts")
    require_one_host(config, trainer_nodes=config.trainer.nodes)
    for degree in (config.trainer.parallelism.context_parallel_degree, layout.get(CP, 1)):
        require(
            degree == 1,
            f"{CP} is {degree}, and its ranks have parts of a sequence; compare with "
            f"--trainer.parallelism.{CP} 1",
        )
    replay = RolloutReplay(config, options.run.resolve(), last=options.step)
    require(
        config.record.rollouts == "all" or replay.first == options.step - 1,
        f"record.rollouts is {config.record.rollouts!r}, so that only steps right after a "
        f"checkpoint can be compared; --step {replay.first + 1} is one",
    )
    examples = examples_of(replay.read(options.step))
    last = len(examples) - 1
    problem = f"--rollout is {options.rollout}; step {options.step} has the rollouts 0 to {last}"
    require(options.rollout is None or 0 <= options.rollout <= last, problem)
    example = max(examples, key=lambda candidate: float(candidate.gaps.max()))
    if options.rollout is not None:
        example = examples[options.rollout]
    compared = _compared(replay, config, example, options, layout)
    _show(options.step, compared)
    if options.json:
        row = {
            "run": str(options.run),
            "step": options.step,
            "rollout": compared.example.number,
            "findings": [asdict(finding) for finding in compared.findings],
            "modules": {module.name: module.error for module in compared.modules},
            "experts": compared.rerouted,
        }
        print(json.dumps(row))
    return 1 if compared.findings else 0


def _parser() -> ArgumentParser:
    parser = reader_of_a_run(PROGRAM, DESCRIPTION, EPILOG)
    parser.add_argument(
        "--step", metavar="K", type=int, required=True, help="step whose rollouts are used, from 1"
    )
    parser.add_argument(
        "--rollout",
        metavar="I",
        type=int,
        help="rollout of the step, from 0; by default the one whose log-probs differ most",
    )
    parser.add_argument(
        "--under",
        metavar="LAYOUT",
        help="compare the trainer with itself in this layout: degrees of ddp, fsdp, tp and ep, "
        "such as fsdp2-tp2",
    )
    return parser


def _compared(
    replay: "RolloutReplay",
    config: "RLConfig",
    example: "Example",
    options: Namespace,
    layout: dict[str, int],
) -> "Compared":
    """Run the sessions of the comparison; ``layout`` are the degrees of ``--under``, if given."""
    from torchtitan.config import TORCH_DTYPE_MAP

    from rl.cli.arguments import read_config
    from rl.cli.saved_run import run_session
    from rl.compare.comparison import (
        Comparison,
        comparable,
        compared_of,
        loaded_before,
        stale_cache_findings,
        with_layout,
    )
    from rl.config import RLConfig
    from rl.host.disk import TemporaryFolder

    _, before = read_config(["--config", str(options.run / "config.json")], program=PROGRAM)
    assert isinstance(before, RLConfig)
    recorded = TORCH_DTYPE_MAP[before.generator.dtype]

    def comparison(session: "Session") -> Comparison:
        temperature = config.temperature(options.step - 1)
        return Comparison(session, example, temperature=temperature, recorded=recorded)

    async def with_generator(session: "Session") -> "Compared":
        """Compare generator and trainer, then the generator's cached prefixes after a push."""
        async with loaded_before(replay, session, options.step) as steps:
            await session.push()
            compared = await comparison(session).compare()
            await comparison(session).cached(fresh=True)
            await anext(steps)  # other weights
            await session.push()
            cached = await comparison(session).cached(fresh=False)
            stale = stale_cache_findings(cached, await comparison(session).cached(fresh=True))
        return replace(compared, findings=[*compared.findings, *stale])

    async def in_own_layout(session: "Session") -> "Activations":
        async with loaded_before(replay, session, options.step):
            await session.save_weights(copy)
        return await comparison(session).trained()

    async def in_layout(session: "Session") -> "Activations":
        await session.load_weights(copy)
        return await comparison(session).trained()

    with TemporaryFolder("tiller-compare-") as temporary:
        folder = Path(temporary)
        replay.link(folder)
        if not layout:
            both = comparable(replace(replay.session_config, generator=config.generator))
            return run_session(both, None, with_generator, folder=folder)
        copy = folder / "weights"
        trainer = comparable(replay.session_config)
        ours = run_session(trainer, None, in_own_layout, folder=folder)
        theirs = run_session(with_layout(trainer, layout), None, in_layout, folder=folder / "other")
    return compared_of(example, {"trainer": ours, options.under: theirs})


def _show(step: int, compared: "Compared") -> None:
    """Print the worst tokens, the largest difference of each layer, and the findings."""
    example = compared.example
    prompt = example.rollout.prompt.prompt_id
    print(
        f"step {step}, rollout {example.number}: prompt {prompt}, sample {example.rollout.sample}"
    )
    sides = [*compared.logprobs]
    print(f"{'log-prob of token':<28}{'recorded':>14}" + "".join(f"{name:>14}" for name in sides))
    for index in example.worst(SHOWN_TOKENS):
        values = [float(example.sequence.logprobs[index])]
        values += [float(compared.logprobs[side][index]) for side in sides]
        print(
            f"  {index:<6} id {int(example.sequence.tokens[index]):<16}"
            + "".join(f"{value:>14.6f}" for value in values)
        )
    print(f"{'largest difference of':<28}{'relative':>14}  at")
    for layer, worst in compared.by_layer().items():
        routed = compared.rerouted.get(layer)
        print(f"  {layer:<26}{worst.error:>14.2e}  {worst.name}{f'; {routed}' if routed else ''}")
    for number, finding in enumerate(compared.findings):
        begins = "first difference" if number == 0 else "then"
        print(f"{begins}: {finding.kind}{finding.module and f' {finding.module}'}: {finding.text}")
    if not compared.findings:
        print(f"{' and '.join(sides)} are equal beyond rounding")


if __name__ == "__main__":
    end_program(main())
