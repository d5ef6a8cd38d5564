"""Episodes of several turns against the same requests on a bare vLLM engine, and the cost of a turn
with thousands of episodes.

Usage: python scripts/bench/episodes.py [--rounds N] [--repeats N] [--tiny] [--json]

"ours_over_engine": episodes are driven by the rollouter over the session's generator; their
environments answer at once. Each round of requests is then given to a bare engine in another
process, with the same weights and options. Both sides take turns. The ratio is of tokens per second
on the wall, the median over the rounds.

"cached" is the share of the prompt tokens of later turns that the bare engine found in its prefix
cache. It gets the requests of the episodes in their order.

"cost_growth": episodes with real environments and Qwen3's dialect on a generator that answers at
once. It is the CPU time of a turn with 2,000 episodes at once over that with 100; runs of both
kinds take turns, and the ratio is the median.
"""

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from bare_engine import BareEngine, write_model
from generator import MODEL, TINY_MODEL, random_weights

import rl  # noqa: F401  # before anything imports torchtitan, which asks it for the device
from rl.environments.protocol import EnvironmentTask, MessageEnvironment, Opening, Reply
from rl.errors import RunError
from rl.generation.generator_config import GeneratorConfig
from rl.model.shape import ModelConfig
from rl.observe.spans import Stopwatch
from rl.rollout.episodes import Environments
from rl.rollout.rollouter import Rollouter
from rl.session.session import Session
from rl.session.session_config import SessionConfig
from rl.types import (
    Completion,
    EpisodeEnd,
    EpisodeTurn,
    GenerationRequest,
    Prompt,
    Rollout,
    Sampling,
)

SAMPLES = 8
BLOCK = 32  # tokens per block of the KV cache
FEW = 100  # episodes
MANY = 2_000
TURNS = 8  # turns of an episode whose cost is measured


@dataclass(frozen=True, kw_only=True)
class Case:
    """Episodes of a round: a first prompt, and turns of sampled and of given tokens."""

    model: ModelConfig
    prompts: int
    opening: int
    sampled: int
    given: int
    turns: int

    @property
    def longest(self) -> int:
        """Length of an episode, in tokens."""
        return self.opening + self.turns * (self.sampled + self.given)


CASE = Case(
    model=replace(MODEL, max_seq_len=1024), prompts=4, opening=512, sampled=32, given=16, turns=6
)
TINY = Case(
    model=replace(TINY_MODEL, max_seq_len=256), prompts=1, opening=96, sampled=8, given=8, turns=2
)


class Script:
    """Environments that answer at once, with random tokens, and end after some turns."""

    def __init__(self, case: Case, seed: int):
        self._case = case
        self._seed = seed
        self._turns: dict[int, int] = {}

    async def open(self, key: int, prompt: Prompt, sample: int) -> EpisodeTurn:
        self._turns[key] = 0
        return EpisodeTurn(tokens=self._draw(f"{prompt.prompt_id}", self._case.opening))

    async def step(self, key: int, answer: Completion) -> EpisodeTurn:
        self._turns[key] += 1
        if self._turns[key] < self._case.turns:
            return EpisodeTurn(tokens=self._draw(f"{key}/{self._turns[key]}", self._case.given))
        end = EpisodeEnd(text="", reward=0.0, correct=False, metrics={}, stop_reason="done")
        return EpisodeTurn(tokens=[], end=end)

    async def close(self, keys: Iterable[int]) -> None:
        pass

    def _draw(self, name: str, count: int) -> list[int]:
        words = range(self._case.model.vocab_size)
        return random.Random(f"{self._seed}/{name}").choices(words, k=count)


class Ours:
    """Episodes over the generator of a session."""

    def __init__(self, config: GeneratorConfig, case: Case, folder: Path):
        self._case = case
        self._runner = asyncio.Runner()
        self._runner.run(self._start(config, replace(case.model, hf_path=str(folder)), folder))

    async def _start(self, config: GeneratorConfig, model: ModelConfig, folder: Path) -> None:
        self._session = Session(
            SessionConfig(model=model, trainer=None, generator=config), folder=folder
        )
        await self._session.start()
        await self._session.connect()

    def play(self, seed: int) -> tuple[list[list[GenerationRequest]], float]:
        """Return the requests of each round of episodes, and the seconds of all rounds."""
        rounds: list[list[GenerationRequest]] = []
        case = self._case

        async def generate(requests: list[GenerationRequest]) -> list[Completion]:
            rounds.append(requests)
            return await self._session.sample(requests)

        rollouter = Rollouter(
            environments=Script(case, seed), longest=case.longest, seed=seed, watch=Stopwatch()
        )
        prompts = [Prompt(prompt_id=n, tokens=[], text="", answer="") for n in range(case.prompts)]
        sampling = Sampling(max_tokens=case.sampled)

        async def timed() -> float:  # the runner takes time to write out what a task returns
            begun = time.perf_counter()
            await rollouter.collect(prompts, sampling, samples=SAMPLES, generate=generate)
            return time.perf_counter() - begun

        return rounds, self._runner.run(timed())

    def close(self) -> None:
        self._runner.run(self._session.stop())
        self._runner.close()


def against_engine(case: Case, rounds: int, folder: Path) -> dict[str, float]:
    """Measure episodes, and the same requests on a bare engine, alternately."""
    config = GeneratorConfig(kv_cache_gib=0.25, block_size=BLOCK)
    weights, state = random_weights(case.model)
    write_model(folder, case.model, weights, state)
    engine = BareEngine("unified", config, case.model, folder)
    ours = Ours(config, case, folder)
    engine.wait()
    ratios = []
    cached = given = 0
    for seed in range(rounds + 1):
        requests, seconds = ours.play(seed)
        works = [engine.generate(each) for each in requests]
        if seed:  # the first round warms up both
            ratios.append(sum(work.wall_s for work in works) / seconds)
            cached += sum(work.cached for work in works[1:])
            given += sum(len(each.prompt_tokens) for turn in requests[1:] for each in turn)
    ours.close()
    engine.close()
    return {"ours_over_engine": statistics.median(ratios), "cached": cached / given}


class Talk(EnvironmentTask):
    """Task whose environment answers each turn with the same words."""

    @dataclass(kw_only=True, slots=True)
    class Config(EnvironmentTask.Config):
        pass

    def prompt(self, prompt_id: int) -> Prompt:
        return self.seed_prompt(prompt_id)

    def eval_prompts(self, count: int) -> list[Prompt]:
        return []

    def environment(self, prompt: Prompt, sample: int) -> MessageEnvironment:
        return _Talk()


class _Talk(MessageEnvironment):
    turns = 0

    async def reset(self) -> Opening:
        return Opening([{"role": "user", "content": "What is 1 + 2?"}])

    async def step(self, message: Any) -> Reply:
        self.turns += 1
        message = {"role": "user", "content": "Are you sure?"}
        return Reply(messages=[message], reward=1.0, done=self.turns == TURNS)


async def _instant(requests: list[GenerationRequest]) -> list[Completion]:
    await asyncio.sleep(0)
    return [
        Completion(tokens=[70] * 16, logprobs=[-1.0] * 16, versions=[0] * 16, finish_reason="stop")
        for _ in requests
    ]


def turn_cost(task: EnvironmentTask, episodes: int) -> float:
    """Return the CPU seconds per turn with ``episodes`` concurrent episodes."""
    rollouter = Rollouter(environments=Environments(task), longest=2048, seed=0, watch=Stopwatch())
    prompts = [task.prompt(number) for number in range(-(-episodes // SAMPLES))]
    begun = time.process_time()
    groups = asyncio.run(
        rollouter.collect(prompts, Sampling(max_tokens=16), samples=SAMPLES, generate=_instant)
    )
    seconds = time.process_time() - begun
    played = [group for group in groups if isinstance(group, list)]
    rollouts: list[Rollout] = [each for group in played for each in group]
    turns = sum(len(each.turns) for each in rollouts)
    if turns != len(prompts) * SAMPLES * TURNS:
        raise RunError(f"{turns} turns were played: nothing was measured")
    return seconds / turns


def concurrency(folder: Path, many: int, repeats: int) -> dict[str, float]:
    """Measure the cost of a turn with few and with many episodes, alternately."""
    model = str(folder / "model")
    data = str(folder / "problems.jsonl")
    script = Path(__file__).parents[1] / "make_tiny_model.py"
    command = [sys.executable, script, "--model-dir", model, "--data", data, "--lines", "60"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    task = Talk.Config(max_turns=TURNS, max_episode_tokens=2048).build(
        seed=0, model=ModelConfig(hf_path=model, max_seq_len=2048)
    )
    turn_cost(task, FEW)  # warm-up: imports and first allocations
    gc.freeze()  # as rl.train does
    growths = []
    costs = []
    for _ in range(repeats):
        before = [turn_cost(task, FEW) for _ in range(4)]
        costs.append(turn_cost(task, many))
        after = [turn_cost(task, FEW) for _ in range(4)]
        growths.append(costs[-1] / statistics.median(before + after))
    return {
        "episodes": many,
        "cpu_us_per_turn": 1e6 * statistics.median(costs),
        "cost_growth": statistics.median(growths),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help="turns that each side takes")
    parser.add_argument("--repeats", type=int, default=5, help="runs of many episodes")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny sizes, only to see that everything runs"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        many = 2 * FEW if arguments.tiny else MANY
        result = concurrency(folder, many, arguments.repeats)
        case = TINY if arguments.tiny else CASE
        result |= against_engine(case, arguments.rounds, folder)
    print(
        f"{result['episodes']:,} episodes at once: {result['cpu_us_per_turn']:.0f} us of CPU a "
        f"turn, {result['cost_growth']:.2f} x that of {FEW}"
    )
    print(
        f"ours over engine {result['ours_over_engine']:.3f}, prompt tokens of later turns in the "
        f"prefix cache {result['cached']:.3f}"
    )
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
