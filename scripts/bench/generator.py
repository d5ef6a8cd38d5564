"""Generation through router and actor against a bare vLLM engine, and torchtitan's Qwen3 in vLLM
against vLLM's own Qwen3.

Usage: python scripts/bench/generator.py [--rounds N] [--no-compile] [--json]

All sides have the same weights, in fp32, and run alternately on the same prompts, seeds and
sampling, each in its own process with one thread: the generator's actor, called through the router
once for all groups, or once per group with all calls in flight together; and plain loops over an
``LLMEngine`` with torchtitan's model (unified) and vLLM's (native), eager and compiled. Actor and
engine are compared in tokens per second on the wall, the models in tokens per second of CPU time,
which other programs on the host disturb least. Ratios are medians over the rounds. "alike" is the
share of greedy completions in which a side agrees with the first, token for token, and "apart" the
largest difference of their log-probs.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from bare_engine import BareEngine, Work, write_model
from torchtitan.models.common.attention import ScaledDotProductAttention

import rl  # noqa: F401  # before anything imports torchtitan, which asks it for the device
from rl.generation.generator_config import GeneratorConfig
from rl.model.decoder import decoder_config
from rl.model.shape import ModelConfig, shape_of
from rl.session.session import Session
from rl.session.session_config import SessionConfig
from rl.types import Completion, GenerationRequest, Prompt, Rollout, Sampling

SAMPLES = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """Model, and the requests of a round."""

    model: ModelConfig
    prompts: int
    prompt_tokens: int
    new_tokens: int

    @property
    def tokens(self) -> int:
        """Number of tokens that a round generates."""
        return self.prompts * SAMPLES * self.new_tokens

    def requests(self, seed: int, temperature: float = 1.0) -> list[GenerationRequest]:
        """Return groups of SAMPLES requests for random prompts, end to end."""
        draw = random.Random(seed)
        sampling = Sampling(max_tokens=self.new_tokens, temperature=temperature)
        prompts = [
            draw.choices(range(self.model.vocab_size), k=self.prompt_tokens)
            for _ in range(self.prompts)
        ]
        return [
            GenerationRequest(
                request_id=f"{seed}/{number}/{sample}",
                prompt_tokens=prompt,
                seed=draw.getrandbits(63),
                sampling=sampling,
            )
            for number, prompt in enumerate(prompts)
            for sample in range(SAMPLES)
        ]


def rollouts_of(
    requests: Sequence[GenerationRequest], completions: Sequence[Completion]
) -> list[Rollout]:
    """Return completions without a reward as rollouts, in the order of their ``requests``."""
    return [
        Rollout.single_turn(
            Prompt(prompt_id=0, tokens=request.prompt_tokens, text="", answer=""),
            completion,
            sample=number,
            text="",
            reward=0.0,
        )
        for number, (request, completion) in enumerate(zip(requests, completions, strict=True))
    ]


MODEL = ModelConfig(
    vocab_size=512,
    dim=256,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    head_dim=64,
    hidden_dim=768,
    max_seq_len=256,
)
TINY_MODEL = ModelConfig(dim=64, hidden_dim=128, max_seq_len=64)
CASE = Case(model=MODEL, prompts=8, prompt_tokens=48, new_tokens=64)
TINY = Case(model=TINY_MODEL, prompts=2, prompt_tokens=8, new_tokens=8)


class Ours:
    """The generator as a session has it: an actor behind the router, with weights that were pushed
    to it.
    """

    def __init__(self, config: GeneratorConfig, model: ModelConfig, folder: Path):
        self._runner = asyncio.Runner()
        self._runner.run(self._start(config, replace(model, hf_path=str(folder)), folder))

    async def _start(self, config: GeneratorConfig, model: ModelConfig, folder: Path) -> None:
        self._session = Session(
            SessionConfig(model=model, trainer=None, generator=config), folder=folder
        )
        await self._session.start()
        await self._session.connect()

    def generate(self, requests: list[GenerationRequest], in_call: int) -> Work:
        """Return the completions of ``requests``. Calls of ``in_call`` requests each are in flight
        together.
        """
        calls = [requests[start : start + in_call] for start in range(0, len(requests), in_call)]

        async def all_calls() -> list[Any]:
            return await asyncio.gather(
                *(self._session.sample(call, affinity=call[0].request_id) for call in calls)
            )

        begun = time.perf_counter()
        answers = self._runner.run(all_calls())
        wall = time.perf_counter() - begun
        return Work([completion for answer in answers for completion in answer], wall, wall)

    def close(self) -> None:
        self._runner.run(self._session.stop())
        self._runner.close()


def random_weights(model: ModelConfig) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return random parameters, and the state dict that is converted to Hugging Face's names. The
    weights are scaled up, so that some tokens are likely.
    """
    torch.manual_seed(0)
    config = decoder_config(
        shape_of(model), fuse_qkv=model.fuse_qkv, inner_attention=ScaledDotProductAttention.Config()
    )
    titan = config.build()
    titan.init_states(buffer_device=torch.device("cpu"))
    with torch.no_grad():
        for parameter in titan.parameters():
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    return {
        name: parameter.detach() for name, parameter in titan.named_parameters()
    }, titan.state_dict()


Side = Callable[[list[GenerationRequest]], Work]


def compare(
    sides: dict[str, Side], case: Case, rounds: int
) -> tuple[dict[str, list[Work]], float, float]:
    """Return the rounds of each side after the first round. The first round is greedy: also return
    its share of equal completions, and the largest difference of their log-probs.
    """
    first, *others = (side(case.requests(0, temperature=0.0)) for side in sides.values())
    pairs = [
        pair for other in others for pair in zip(first.completions, other.completions, strict=True)
    ]
    same = [(one, other) for one, other in pairs if one.tokens == other.tokens]
    apart = [
        abs(p - q) for one, other in same for p, q in zip(one.logprobs, other.logprobs, strict=True)
    ]
    works: dict[str, list[Work]] = {name: [] for name in sides}
    order = list(sides)
    for number in range(1, rounds + 1):
        requests = case.requests(number)
        for name in order:
            works[name].append(sides[name](requests))
        order.reverse()
    return works, len(same) / len(pairs), max(apart)


def run(case: Case, rounds: int, modes: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """Start all sides, measure them alternately, and end them."""
    config = GeneratorConfig(kv_cache_gib=0.25)
    weights, state = random_weights(case.model)
    write_model(folder, case.model, weights, state)
    print("starting", end="", flush=True)
    engines = {}
    for mode in modes:
        for kind in ("unified", "native"):
            options = GeneratorConfig(
                kv_cache_gib=config.kv_cache_gib, enforce_eager=mode == "eager"
            )
            engines[f"{kind}_{mode}"] = BareEngine(kind, options, case.model, folder)
    ours = Ours(config, case.model, folder)
    print(": actor", end="", flush=True)
    for name, engine in engines.items():
        engine.wait()
        print(f", {name.replace('_', ' ')}", end="", flush=True)
    print(flush=True)
    sides: dict[str, Side] = {
        "one_call": lambda requests: ours.generate(requests, len(requests)),
        "groups": lambda requests: ours.generate(requests, SAMPLES),
        **{name: engine.generate for name, engine in engines.items()},
    }
    works, alike, apart = compare(sides, case, rounds)
    ours.close()
    for engine in engines.values():
        engine.close()
    return {
        **ratios(works, modes),
        "tokens_per_s": {
            name: case.tokens / statistics.median(w.wall_s for w in works[name]) for name in works
        },
        "greedy_alike": alike,
        "logprobs_apart": apart,
    }


def ratios(works: dict[str, list[Work]], modes: tuple[str, ...]) -> dict[str, float]:
    """Return our speeds over those of the other sides. A short name stands for the lowest ratio of
    both ways to call and of both modes.
    """

    def ratio(ours: str, theirs: str, seconds: Callable[[Work], float]) -> float:
        return statistics.median(
            seconds(b) / seconds(a) for a, b in zip(works[ours], works[theirs], strict=True)
        )

    engine = {
        f"_{way}": ratio(way, "unified_eager", lambda work: work.wall_s)
        for way in ("one_call", "groups")
    }
    native = {
        f"_{mode}": ratio(f"unified_{mode}", f"native_{mode}", lambda work: work.cpu_s)
        for mode in modes
    }
    found = {"ours_over_engine": min(engine.values()), "unified_over_native": min(native.values())}
    found |= {f"ours_over_engine{way}": value for way, value in engine.items()}
    return found | {f"unified_over_native{mode}": value for mode, value in native.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="turns that each side takes")
    parser.add_argument(
        "--no-compile", action="store_true", help="eager alone: compiling takes a minute"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="tiny sizes, only to see that everything runs"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    arguments = parser.parse_args()
    modes = ("eager",) if arguments.no_compile else ("eager", "compiled")
    with tempfile.TemporaryDirectory() as folder:
        result = run(TINY if arguments.tiny else CASE, arguments.rounds, modes, Path(folder))
    for name, speed in result["tokens_per_s"].items():
        print(f"{name:17} {speed:9,.0f} tokens/s")
    print(", ".join(f"{name} {value:.3f}" for name, value in result.items() if "_over_" in name))
    print(
        f"greedy completions alike {result['greedy_alike']:.3f}, log-probs apart "
        f"{result['logprobs_apart']:.0e}"
    )
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
