"""The program: recorded steps of a run, trained again.

Exit codes: 0 equal, compared, or not failed again; 1 different or failed; 2 the arguments cannot
work; 128 + n ended by signal n.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rl.cli.program import as_program, reader_of_a_run
from rl.errors import ConfigError, Interrupted, counted, end_program, nearest, printable, require

if TYPE_CHECKING:
    from rl.config import RLConfig, RunConfig
    from rl.replay.repeated_call import RepeatedCall
    from rl.replay.replay import Replay, ReplayedStep
    from rl.session.session import Session

Result = TypeVar("Result")

PROGRAM = "python -m rl.replay"
DESCRIPTION = """\
Train recorded steps of a run again, without generators: from the newest
checkpoint before step K, on the rollouts in RUN/rollouts or on the data set, up
to step K. The digests of gradient and weights must equal those in
RUN/digests.jsonl, bit for bit, on the same kind of machine; otherwise the
program names the first step and parameter that differ.

  python -m rl.replay runs/first --step 120

With another choice, the same rollouts are trained on in another way, and the
metrics of each step are shown beside the recorded ones:

  python -m rl.replay runs/first --step 120 --under fsdp2-tp2
  python -m rl.replay runs/first --step 120 --loss dapo --lr 1e-5

After a failure, --failed makes the failing call again, with nothing else: the
step that failed, or the reward of the group that was lost. It compares the
error with that in RUN/failure.json. With other options it tries a fix:

  python -m rl.replay runs/first --failed
  python -m rl.replay runs/first --failed --lr 1e-7"""
EPILOG = """\
The run folder is only read. Any field of the run's config can be given after
these arguments, with the names that python -m rl.train takes; each is another
choice.

exit codes: 0 equal, or compared with another choice, or not failed again;
1 different or failed; 2 the arguments cannot work; 130 Ctrl-C"""
SAME = "gradient and weights are equal"
SHOWN = (
    "loss/mean",
    "trainer/grad_norm",
    "entropy/mean",
    "ratio/mean",
    "ratio/clipped",
    "kl/behaviour",
    "advantage/std",
    "trainer/lr/AdamW",
)
"""Metrics that are shown beside the recorded ones, if a step has them."""


OF_THE_MACHINE = ("timing/", "memory/", "critic/memory/", "mfu", "trainer/tflop")
"""Beginnings of the names of metrics that are not compared."""


@as_program
def main(arguments: list[str]) -> int:
    """Replay recorded steps, or a failing call."""
    options, overrides = _parser().parse_known_args(arguments)
    require(
        options.failed or options.step is not None,
        "name the last step, --step K, or a failure: --failed",
    )
    require(
        not options.failed or options.step is None,
        "--failed and --step are different questions; give one of them",
    )
    require(options.failed or options.step >= 1, f"--step is {options.step}; it must be at least 1")
    if options.lr is not None:
        overrides += ["--trainer.optimizer.param_groups.0.optimizer_kwargs.lr", options.lr]

    # these import torch, which --help does without
    from rl.actors import fork_server

    fork_server.start()
    from rl.cli.saved_run import read_run, require_one_host
    from rl.training.trainer_config import degrees_of
    from rl.validation import validate

    if options.under is not None:
        for field, degree in degrees_of(options.under, option="--under").items():
            overrides += [f"--trainer.parallelism.{field}", str(degree)]
    config = read_run(options.run, overrides, program=PROGRAM)
    if options.loss is not None:
        config = _with_loss(config, options.loss)
        validate(config)
    require_one_host(config, trainer_nodes=config.trainer.nodes)
    is_same = not overrides and options.loss is None
    if options.failed:
        return _fail_again(options, config, is_same=is_same)
    return _train_again(options, config, is_same=is_same)


def _parser() -> ArgumentParser:
    parser = reader_of_a_run(PROGRAM, DESCRIPTION, EPILOG)
    parser.add_argument("--step", metavar="K", type=int, help="last step to train again, from 1")
    parser.add_argument(
        "--failed", action="store_true", help="make the call again that ended the run"
    )
    parser.add_argument(
        "--under",
        metavar="LAYOUT",
        help="layout of the trainer: degrees of ddp, fsdp, cp, tp and ep, such as fsdp2-tp2",
    )
    parser.add_argument("--loss", metavar="NAME", help="loss of the policy, such as dapo or gspo")
    parser.add_argument("--lr", metavar="LR", help="learning rate of the trainer")
    return parser


def _with_loss(config: "RunConfig", name: str) -> "RLConfig":
    """Return the run's config with the loss of this name, with the run's coefficients."""
    from rl.algorithms import losses
    from rl.config import PolicyGradientConfig, RLConfig

    if not isinstance(config, RLConfig):
        raise ConfigError(f"--loss {name}: not an RL run; give the fields of its loss instead")
    algorithm = config.algorithm
    if not isinstance(algorithm, PolicyGradientConfig):
        kind = type(algorithm).__qualname__.removesuffix(".Config")
        raise ConfigError(f"--loss {name}: the run's algorithm is {kind}, which has its own loss")
    kinds = {
        kind.__name__.removesuffix("Loss").lower(): kind.Config
        for kind in vars(losses).values()
        if isinstance(kind, type) and issubclass(kind, losses.PolicyLoss)
    }
    known = {"grpo": losses.grpo, "dapo": losses.dapo} | {k: v for k, v in kinds.items() if k}
    known.pop("policy", None)
    require(
        name in known,
        f"--loss {name}: no such loss; {nearest(name, known)}the losses are {', '.join(known)}",
    )
    before = algorithm.loss
    loss = known[name](entropy_coef=before.entropy_coef, kl_coef=before.kl_coef)
    return replace(config, algorithm=replace(algorithm, loss=loss))


def _replay_of(config: "RunConfig", run: Path, **options: Any) -> "Replay[Any]":
    """Return the replay of the run's kind; ``options`` are those of its constructor."""
    from rl.config import DatasetRunConfig, RLConfig
    from rl.replay.example_replay import ExampleReplay
    from rl.replay.replay import RolloutReplay

    if isinstance(config, RLConfig):
        return RolloutReplay(config, run.resolve(), **options)
    if isinstance(config, DatasetRunConfig):
        return ExampleReplay(config, run.resolve(), **options)
    kind = type(config).__name__
    raise ConfigError(f"{run}: a run of a {kind} has no steps that can be trained again")


def _train_again(options: Namespace, config: "RunConfig", *, is_same: bool) -> int:
    """Train the steps up to ``--step`` again; return the exit code."""
    replay = _replay_of(config, options.run, last=options.step)
    if is_same:
        replay.require_digests()
    steps = f"steps {replay.first + 1} to {options.step}"
    print(f"replaying {steps} of {options.run} from {replay.begins}")
    result = _run(replay, lambda session: _compare(replay, session, is_same=is_same))
    if result["difference"]:
        print(f"different from {result['difference']}")
    elif is_same:
        steps = counted(len(result["steps"]), "step")
        print(f"every gradient and weight of {steps} is equal, bit for bit")
    if options.json:
        print(json.dumps({"run": str(options.run), "from": replay.first, **result}))
    return 1 if result["difference"] else 0


def _run(replay: "Replay[Any]", work: "Callable[[Session], Awaitable[Result]]") -> "Result":
    """Return the result of ``work`` in the session of ``replay``."""
    from rl.cli.saved_run import run_session
    from rl.host.disk import TemporaryFolder

    with TemporaryFolder("tiller-replay-") as folder:
        replay.link(Path(folder))
        return run_session(replay.session_config, None, work, folder=Path(folder))


async def _compare(replay: "Replay[Any]", session: "Session", *, is_same: bool) -> dict[str, Any]:
    """Train the recorded steps again; return what differs from the record.

    If ``is_same``, with the run's own config, stop at the first difference.
    """
    steps = list[dict[str, Any]]()
    await replay.load(session)
    difference = await replay.difference_of_checkpoint(session) if is_same else ""
    if not difference:
        async for replayed in replay.steps(session):
            steps.append(_row(replayed))
            if not is_same:
                print(_side_by_side(replayed), flush=True)
            elif replayed.difference:
                difference = f"step {replayed.step}: {replayed.difference}"
                break
            else:
                print(f"step {replayed.step}: gradient and weights are equal", flush=True)
    return {"equal": is_same and not difference, "difference": difference, "steps": steps}


def _fail_again(options: Namespace, config: "RunConfig", *, is_same: bool) -> int:
    """Make the failing call again; return the exit code."""
    from rl.config import RLConfig
    from rl.replay.repeated_call import read_failure, score_again

    failure = read_failure(options.run)
    if failure["again"] == "reward":
        assert isinstance(config, RLConfig), "other runs have no rewards"
        result = score_again(config, options.run.resolve(), failure)
    else:
        replay = _replay_of(config, options.run, last=failure["step"] + 1, failed=True)
        steps = counted(len(replay.recorded), "step")
        print(
            f"replaying {steps} of {options.run} from {replay.begins}, then step {replay.last + 1}"
        )
        result = _take_again(replay, failure, is_same=is_same)
    print(printable(result.report))
    if options.json:
        print(json.dumps({"run": str(options.run), **result.to_dict()}))
    return 1 if result.error else 0


def _take_again(replay: "Replay[Any]", failure: dict[str, Any], *, is_same: bool) -> "RepeatedCall":
    """Train the recorded steps again, then take the step that failed."""
    from rl.replay.repeated_call import RepeatedCall
    from rl.trainers.endings import facts_of

    call = f"step {replay.last + 1}"
    is_recorded = True

    async def work(session: "Session") -> None:
        nonlocal is_recorded
        await replay.load(session)
        async for replayed in replay.steps(session):
            text = f"different from {replayed.difference}" if replayed.difference else SAME
            shown = f"step {replayed.step}: {text}" if is_same else _side_by_side(replayed)
            print(shown, flush=True)
        is_recorded = False
        await replay.fail_again(session)

    try:
        _run(replay, work)
    except Exception as error:  # any kind of error may be the recorded one
        if is_recorded or isinstance(error, Interrupted):
            raise
        return RepeatedCall(call=call, recorded=failure, error=facts_of(error))
    return RepeatedCall(call=call, recorded=failure)


def _row(replayed: "ReplayedStep") -> dict[str, Any]:
    """Return the metrics of a step beside the recorded ones."""
    recorded = replayed.recorded.metrics
    return {
        "step": replayed.step,
        "logprob_change": replayed.logprob_change,
        "difference": replayed.difference,
        "metrics": {
            name: [recorded[name], value]
            for name, value in replayed.again.metrics.items()
            if name in recorded and not name.startswith(OF_THE_MACHINE)
        },
    }


def _side_by_side(replayed: "ReplayedStep") -> str:
    """Return a table of the step's metrics: recorded, replayed, and their difference."""
    metrics = _row(replayed)["metrics"]
    lines = [f"step {replayed.step:<20}{'recorded':>14}{'replayed':>14}{'difference':>14}"]
    for name in (metric for metric in SHOWN if metric in metrics):
        before, after = metrics[name]
        values = (before, after, after - before)
        lines.append(f"  {name:<23}" + "".join(f"{value:>14.6g}" for value in values))
    if replayed.again.chunks:
        change = replayed.logprob_change
        lines.append(f"  {'log-prob of a token, nats':<51}{change:>14.6g}")
    lines.append(f"  bits: {replayed.difference or 'all are equal'}")
    return "\n".join(lines)


if __name__ == "__main__":
    end_program(main())
