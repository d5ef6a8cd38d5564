"""The program: one episode of an environment in the terminal, with a person or a policy.

Exit codes: 0 done, 1 failed, 2 the arguments cannot work, 128 + n ended by signal n.
"""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from rl.cli.help import CONFIGS, show_help
from rl.cli.program import as_program
from rl.errors import end_program, printable, require

if TYPE_CHECKING:
    from rl.config import RunConfig
    from rl.environments.protocol import EnvironmentTask
    from rl.types import Completion, EpisodeEnd, EpisodeTurn

PROGRAM = "python -m rl.play"
USAGE = f"""\
usage: {{program}} --config NAME [--prompt N] [--FIELD VALUE ...]
       {{program}} --run RUN [--step N] [--prompt N] [--FIELD VALUE ...]

Play one episode of an environment, and print the tokens of each turn: those that are fed to the
policy, and those that are sampled. You are the policy, unless --run names a run, whose policy
plays then. An answer of yours ends with an empty line. It may have tool calls, as the model writes
them.

  --prompt N    number of the prompt; by default 0
  --run RUN     folder of a run
  --step N      checkpoint of the run; by default the newest that is complete

  {{program}} --config my_games.countdown --model.hf_path DIR

{CONFIGS}"""
STRIP_CHARS = 2000

Policy = Callable[[list[int], "EpisodeTurn"], Awaitable["Completion"]]
"""Function from the tokens so far, and the turn that added the last of them, to an answer."""


@as_program
def main(arguments: list[str]) -> None:
    """Play an episode."""
    show_help(arguments, PROGRAM, USAGE)
    parser = argparse.ArgumentParser(prog=PROGRAM, add_help=False, allow_abbrev=False)
    parser.add_argument("--prompt", type=int, default=0)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--step", type=int)
    options, rest = parser.parse_known_args(arguments)
    require(options.prompt >= 0, f"--prompt {options.prompt}: it must be 0 or above")
    if options.run is not None:
        _play_run(options.run, options.step, options.prompt, rest)
        return
    require(options.step is None, "--step needs --run RUN, whose checkpoint it names")

    # these import torch, which --help does without
    from rl.cli.arguments import parse_config
    from rl.types import Completion

    task = _task_of(parse_config(rest, program=PROGRAM)[1])

    async def answer(tokens: list[int], turn: "EpisodeTurn") -> "Completion":
        print("\nyour answer, then an empty line:", flush=True)
        lines = [line.rstrip("\n") for line in takewhile(str.strip, sys.stdin)]
        typed = task.tokenizer.encode("\n".join(lines), add_special_tokens=False)
        return Completion.written([*typed, task.stop_token_ids[0]])

    asyncio.run(play(task, options.prompt, answer))


def _play_run(folder: Path, step: int | None, prompt_id: int, overrides: list[str]) -> None:
    from rl.actors import fork_server

    fork_server.start()
    from rl.cli.saved_run import open_run, run_session
    from rl.config import RLConfig
    from rl.rollout.prompts import derive_seed
    from rl.session.session import Session
    from rl.types import GenerationRequest

    run = open_run(folder, step, overrides, program=PROGRAM)
    config = run.config
    task = _task_of(config)
    assert isinstance(config, RLConfig), "others have no environment"
    sampling = config.rollout.sampling(task.stop_token_ids)
    longest = min(task.config.max_episode_tokens, task.shape.max_seq_len)

    async def work(session: Session) -> None:
        async def answer(tokens: list[int], turn: "EpisodeTurn") -> "Completion":
            length = len(tokens)  # differs between turns
            request = GenerationRequest(
                request_id=f"play/{length}",
                prompt_tokens=tokens,
                seed=derive_seed(config.seed, prompt_id, 0, length, stream="play"),
                sampling=turn.sampling(sampling, longest - length),
            )
            (completion,) = await session.sample([request])
            return completion

        await play(task, prompt_id, answer)

    run_session(run.session_config(evaluates=True), None, work)


async def play(task: "EnvironmentTask", prompt_id: int, answer: Policy) -> "EpisodeEnd":
    """Play the episode of prompt ``prompt_id`` and print each turn; return its end."""
    from rl.rollout.episodes import Environments
    from rl.rollout.prompts import training_prompt

    environments = Environments(task)
    tokens: list[int] = []
    try:
        turn = await environments.open(0, training_prompt(task, prompt_id), 0)
        while turn.end is None:
            print(strip(task, "fed", turn.tokens))
            tokens = turn.tokens if turn.is_whole else tokens + turn.tokens
            sampled = await answer(tokens, turn)
            print(strip(task, "sampled", sampled.tokens))
            tokens = tokens + sampled.tokens
            turn = await environments.step(0, sampled)
    finally:
        await environments.close([0])
    end = turn.end
    print(f"\n{end.stop_reason}: reward {end.reward:g}, {'' if end.correct else 'not '}correct")
    for name, value in end.metrics.items():
        print(printable(f"{name:>18}  {value}"))
    return end


def strip(task: "EnvironmentTask", kind: str, tokens: Sequence[int]) -> str:
    """Return a title, and the tokens decoded one by one and separated by ``|``."""
    pieces = [repr(task.tokenizer.decode([token]))[1:-1] for token in tokens]
    text = "|".join(pieces)
    if len(text) > STRIP_CHARS:
        text = f"{text[: STRIP_CHARS // 2]} … {text[-STRIP_CHARS // 2 :]}"
    return f"\n[{kind}: {len(tokens)} tokens]\n{text}"


def _task_of(config: "RunConfig") -> "EnvironmentTask":
    from rl.config import RLConfig
    from rl.environments.protocol import EnvironmentTask
    from rl.trainers.trial import build_task

    has_environment = isinstance(config, RLConfig) and isinstance(
        config.task, EnvironmentTask.Config
    )
    require(
        has_environment,
        f"the task of this {type(config).__name__} has no environment to play; choose a config "
        "whose task is an EnvironmentTask, such as GuessingGame.Config",
    )
    assert isinstance(config, RLConfig)
    task = build_task(config)
    assert isinstance(task, EnvironmentTask)
    return task


if __name__ == "__main__":
    end_program(main())
