"""Put a fault into a run of a tiny model, and see what Tiller says.

    python scripts/faults.py NAME [--healthy] [OPTION OF rl.train ...]

``docs/faults.md`` shows the end of each run. ``--healthy`` leaves the fault out. A fault replaces a
method in this process, from which the ranks of the run are forked: on a CPU of one host.
"""

import argparse
import dataclasses
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rl.cli.program import begin
from rl.errors import end_program

SMALL = (
    "--rollout.prompts_per_step 4 --rollout.samples_per_prompt 4 --steps 4 --evaluation.prompts 0 "
    "--generator.kv_cache_gib 0.05 --trainer.lr_scheduler.warmup_steps 0 "
    "--trainer.optimizer.param_groups.0.optimizer_kwargs.lr 0.01"
)
HOUR_S = 3600.0


class Fault(NamedTuple):
    """A fault, and the options of the run that has it."""

    inject: Callable[[], None]
    options: str


FAULTS: dict[str, Fault] = {}


def fault(options: str = "", config: str = "quickstart") -> Callable[..., Callable[[], None]]:
    """Add the decorated function, which injects a fault, to ``FAULTS`` by its name."""

    def add(inject: Callable[[], None]) -> Callable[[], None]:
        FAULTS[inject.__name__] = Fault(inject, f"--config {config} {SMALL} {options}")
        return inject

    return add


def replaces(owner: Any, name: str) -> Callable[..., None]:
    """Replace ``owner.name`` by the decorated function, whose first argument is the original."""

    def replace(other: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def replaced(*args: Any, **options: Any) -> Any:
            return other(original, *args, **options)

        setattr(owner, name, replaced)

    return replace


@fault()
def weights_never_arrive() -> None:
    """Generators report every version, and keep the weights of the first."""
    from rl.weights.shared_memory import SharedMemorySubscriber

    @replaces(SharedMemorySubscriber, "pull")
    def pull(original, self, version):
        return version if version > 0 else original(self, version)


@fault("--model.max_seq_len 128 --task.max_prompt_tokens 100 --generator.block_size 32")
def stale_prefix_cache() -> None:
    """The engine does not reset its prefix cache, and says that it did."""
    from rl.generation.engine import GenerationEngine

    @replaces(GenerationEngine, "__init__")
    def start(original, self, *args, **options):
        original(self, *args, **options)
        self._engine.reset_prefix_cache = lambda **options: True


def guessing():
    """Return the config of a guessing game of several turns; ``model.hf_path`` has to be given."""
    from configs.quickstart import quickstart
    from rl.model.shape import ModelConfig
    from rl.tasks.guessing_game import GuessingGame

    config = quickstart()
    config.task = GuessingGame.Config(max_turns=3, max_episode_tokens=256)
    config.model = ModelConfig(max_seq_len=256)
    config.rollout.max_tokens = 16
    return config


@fault("--model.hf_path {model}", config="faults.guessing")
def retokenized_turns() -> None:
    """Episodes are decoded to text, and the trainer gets the tokens of this text."""
    from rl.environments.task import Task
    from rl.types.sequences import OpenSequence

    @replaces(Task, "set_tokenizer")
    def remember(original, self, tokenizer, *args, **options):
        OpenSequence.tokenizer = tokenizer
        original(self, tokenizer, *args, **options)

    @replaces(OpenSequence, "snapshot")
    def snapshot(original, self):
        whole = original(self)
        text = self.tokenizer.decode(self.tokens)
        again = self.tokenizer.encode(text, add_special_tokens=False)[: len(whole)]
        tokens = whole.tokens.copy()
        tokens[: len(again)] = again
        return dataclasses.replace(whole, tokens=tokens)


@fault("--rollout.max_staleness 1 --trainer.checkpoint.interval 2 --steps 6")
def prompts_lost_in_a_resume() -> None:
    """The trainer dies in step 4. Going back to step 2 forgets what was sampled and not trained."""
    from rl.trainers.ledger import Ledger
    from rl.training.engine import TrainingEngine

    @replaces(TrainingEngine, "optim_step")
    def optim_step(original, self, **options):
        if self.version == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, **options)

    @replaces(Ledger, "restore")
    def restore(original, self, state, finished, version, **options):
        original(self, state, {}, version, **options)


@fault()
def sandbox_fails() -> None:
    """Programs that a reward runs cannot be started any more."""
    from rl.sandbox import sandbox
    from rl.sandbox.sandboxed_program import Limits
    from rl.tasks.copy_digits import CopyDigits

    box = sandbox.open_sandbox(unsafe=True)

    @replaces(CopyDigits, "score")
    def score(original, self, prompt, text, completion):
        if "TILLER_LOG" in os.environ:  # in a process of the run, not before its start
            sandbox.LAUNCHER = Path("/missing.py")
        text = box.run(f"print({text!r})", limits=Limits()).stdout.strip()
        return original(self, prompt, text, completion)


@fault("--rollout.temperature 0.5 --algorithm.loss.kl_coef 0.1 --steps 1")
def kl_is_off() -> None:
    """The reference ignores the temperature that the policy samples with."""
    from rl.training.engine import TrainingEngine

    @replaces(TrainingEngine, "forward")
    def forward(original, self, batch, *, temperature=1.0):
        is_reference = Path(os.environ["TILLER_LOG"]).name.startswith("reference-")
        return original(self, batch, temperature=1.0 if is_reference else temperature)


@fault(
    "--trainer.parallelism.data_parallel_shard_degree 2 --deadlines.call 15 --max_restarts 0 "
    "--steps 1"
)
def hung_collective() -> None:
    """Rank 1 of the trainer never reaches the all-reduce of the gradient's norm."""
    from torch import distributed

    from rl.training import gradient

    @replaces(gradient, "divide_and_clip")
    def clip(original, *args):
        if distributed.get_rank() == 1:
            time.sleep(HOUR_S)
        return original(*args)


@fault("--steps 8")
def silent_nan() -> None:
    """One parameter has a gradient of NaN in every step."""
    from rl.training import gradient

    @replaces(gradient, "divide_and_clip")
    def clip(original, parameters, *limits):
        given = [*parameters]
        given[0].grad.mul_(float("nan"))
        return original(given, *limits)


@fault(
    "--model.num_experts 4 --model.experts_per_token 2 --model.moe_hidden_dim 96 "
    "--trainer.router_replay generator"
)
def routing_differs() -> None:
    """The trainer computes each token with the experts of the token before."""
    from rl.training import engine

    @replaces(engine, "give")
    def give(original, routers, experts=None):
        original(routers, None if experts is None else experts.roll(1, dims=1))


@fault("trainer.lora:on")
def adapter_not_merged() -> None:
    """Generators get the weights of the base model without the adapter that is trained."""
    from rl.training.lora import AdaptedWeight

    @replaces(AdaptedWeight, "added")
    def added(_original, _self, shard):
        return shard.tensor.new_zeros(())


def make_model(folder: str) -> str:
    """Write a tiny model; return its folder."""
    path = f"{folder}/model"
    script = Path(__file__).with_name("make_tiny_model.py")
    made = ("--model-dir", path, "--data", f"{folder}/data.jsonl", "--lines", "60")
    subprocess.run([sys.executable, script, *made], check=True)
    return path


def main() -> int:
    epilog = "\n".join(f"  {name}: {each.inject.__doc__}" for name, each in FAULTS.items())
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog=f"faults:\n{epilog}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", choices=FAULTS)
    parser.add_argument("--healthy", action="store_true", help="leave the fault out")
    given, others = parser.parse_known_args()
    chosen = FAULTS[given.name]
    with tempfile.TemporaryDirectory(prefix="tiller-fault-") as folder:
        model = make_model(folder) if "{model}" in chosen.options else ""
        if not given.healthy:
            chosen.inject()
        from rl.train import main as train

        return train([*chosen.options.format(model=model).split(), *others])


if __name__ == "__main__":
    begin()
    end_program(main())
