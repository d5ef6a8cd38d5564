"""The trainer's step against a bare torchtitan loop, against transformers, and against itself
without shared prompts; and the memory of its log-probs.

Usage: python scripts/bench/trainer.py [--repeats N] [--plot FILE] [--json]
       python scripts/bench/trainer.py --device cuda [--float8] [--json]

All sides train one model from the same weights on the same tokens in the same micro-batches, by
turns, in one process with one thread. Speeds are tokens per second of CPU time, which other
programs on the host disturb least; ratios are medians over the turns. "apart" is the largest
difference between their losses. Memory is what one forward and backward pass adds, at its
peak, to a process of its own.

--device cuda trains a larger model in bf16 with varlen attention, and also reports which fraction
it reaches of the card's matrix-multiply peak, measured in the same run. It has not been run: there
was no card.
"""

import argparse
import json
import math
import os
import statistics
import time
from dataclasses import replace

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from logprob_memory import compare_memory
from ranks import become_rank, on_ranks
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.config import CompileConfig, TrainingConfig
from training_sides import Case, Step, build

from configs.qwen3 import qwen3_0_6b
from rl.host.platform import device_type
from rl.model.shape import ModelConfig
from rl.training.matmul import Kernel, use_kernel


def small_model(vocab_size: int, n_layers: int, dim: int = 256, length: int = 257) -> ModelConfig:
    heads = {"n_heads": 4, "n_kv_heads": 2, "head_dim": dim // 4}
    return ModelConfig(
        vocab_size=vocab_size,
        dim=dim,
        n_layers=n_layers,
        hidden_dim=3 * dim,
        max_seq_len=length,
        **heads,
    )


BOTH = ("bare", "transformers")
MANY_WORDS = Case(model=small_model(32_768, n_layers=4), sequences=4, micro_batch_size=2)
GROUPS = Case(
    model=small_model(4096, n_layers=4, length=321),
    sequences=16,
    micro_batch_size=16,
    prompt_tokens=256,
    samples_per_prompt=8,
    trainer={"prompt_sharing": 8},
    others=("unshared",),
)
CASES = {
    "": Case(model=small_model(4096, n_layers=6), sequences=8, micro_batch_size=4, others=BOTH),
    "_32k": MANY_WORDS,
    "_32k_chunked": replace(MANY_WORDS, trainer={"logits_mib": 16}),
    "_prompts": GROUPS,
}
SMALLEST = small_model(64, 1, dim=32, length=17)
TINY = {
    "": Case(model=SMALLEST, sequences=4, micro_batch_size=2, others=BOTH),
    "_prompts": replace(GROUPS, model=SMALLEST, sequences=4, micro_batch_size=4, prompt_tokens=12),
}
QWEN3_0_6B = replace(qwen3_0_6b().model, max_seq_len=2049)
ON_CUDA = Case(
    model=QWEN3_0_6B,
    sequences=32,
    micro_batch_size=2,
    trainer={"training": TrainingConfig(mixed_precision_param="bfloat16")},
)
IN_FLOAT8 = replace(
    ON_CUDA,
    trainer={
        **ON_CUDA.trainer,
        "float8": Float8LinearConverter.Config(),
        "compile": CompileConfig(enable=True),
    },
    others=(),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=8, help="turns that each side takes")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="also measure smaller vocabularies, and draw them as a PNG file",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="tiny sizes, only to see that everything runs"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--float8", action="store_true", help="with --device cuda: compiled, in float8, ours alone"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    arguments = parser.parse_args()
    if arguments.device != device_type():
        parser.error(
            f"this host computes on {device_type()}: give --device {device_type()}, or hide its "
            "cards with CUDA_VISIBLE_DEVICES="
        )
    if arguments.device == "cuda":
        result = on_cuda(arguments.repeats, float8=arguments.float8)
    else:
        result = speeds(TINY if arguments.tiny else CASES, arguments.repeats)
        tokens, vocab_size = (512, 8192) if arguments.tiny else (4096, 151_936)
        result |= compare_memory(tokens, vocab_size, arguments.plot)
        result["mkl_over_onednn"] = on_ranks(1, mkl_over_onednn)[0]
        print(f"MKL takes {result['mkl_over_onednn']:.2f} times oneDNN's time")
    if arguments.json:
        print(json.dumps(result))
    return 0


def speeds(cases: dict[str, Case], repeats: int) -> dict[str, float]:
    """Return our tokens per second over the others' for each case, and the largest difference of
    the losses.
    """
    result = {}
    spreads = []
    for suffix, case in cases.items():
        fields = "".join(f", {name}={value}" for name, value in case.trainer.items())
        print(
            f"{case.model.n_layers} layers, vocabulary {case.model.vocab_size:,}{fields}: ours",
            end=" ",
            flush=True,
        )
        times, spread = on_ranks(1, run_case, case, repeats)[0]
        print(f"{case.tokens / statistics.median(times['ours']):,.0f} tokens/s", end="")
        for other in case.others:
            ratio = statistics.median(
                b / a for a, b in zip(times["ours"], times[other], strict=True)
            )
            result[f"ours_over_{other}{suffix}"] = ratio
            print(f", {ratio:.3f} x {other}", end="")
        print(f", apart {spread:.0e}")
        spreads.append(spread)
    return result | {"loss_spread": max(spreads)}


def run_case(case: Case, repeats: int) -> tuple[dict[str, list[float]], float]:
    """Run ``take_turns`` in a separate process."""
    _, sides = build(case)
    return take_turns(sides, repeats)


def mkl_over_onednn() -> float:
    """Return the time of MKL's products over that of oneDNN's, for the products of a layer's
    forward and backward pass.
    """
    x, weight, gradient = torch.ones(1024, 256), torch.ones(768, 256), torch.ones(1024, 768)
    products = [(x, weight.T), (gradient, weight), (gradient.T, x)]
    kernels: tuple[Kernel, Kernel] = ("onednn", "mkl")
    seconds = dict.fromkeys(kernels, math.inf)
    for _ in range(10):
        for kernel in kernels:
            use_kernel(kernel)
            begin = time.thread_time()
            for a, b in products:
                a @ b
            seconds[kernel] = min(seconds[kernel], time.thread_time() - begin)
    return seconds["mkl"] / seconds["onednn"]


def take_turns(sides: dict[str, Step], repeats: int) -> tuple[dict[str, list[float]], float]:
    """Return the seconds of each side's steps after the first, and the largest difference of the
    sides' losses.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides)
    spread = 0.0
    for _ in range(1 + repeats):
        losses = []
        for name in order:
            begin = clock()
            losses.append(sides[name]())
            times[name].append(clock() - begin)
        order.reverse()  # the caches that a step leaves may speed up the next step
        spread = max(spread, max(losses) - min(losses))
    return {name: seconds[1:] for name, seconds in times.items()}, spread


def clock() -> float:
    """Return seconds: CPU time of this process, or elapsed time with a GPU."""
    if device_type() == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def on_cuda(repeats: int, *, float8: bool) -> dict[str, float]:
    """Return our tokens per second over those of bare torchtitan, and the fraction of the card's
    matrix-multiply peak that the model reaches.

    A token costs 6 operations per parameter; those of attention itself are left out.
    """
    become_rank(0, 1)
    engine, sides = build(IN_FLOAT8 if float8 else ON_CUDA)
    times, _ = take_turns(sides, repeats)
    seconds = {name: statistics.median(of_side) for name, of_side in times.items()}
    speed = ON_CUDA.tokens / seconds["ours"]
    operations = 6 * sum(parameter.numel() for parameter in engine.model.parameters())
    result = {"tokens_per_s": speed, "fraction_of_matmul_peak": operations * speed / matmul_peak()}
    result |= {
        f"ours_over_{name}": seconds[name] / seconds["ours"]
        for name in ON_CUDA.others
        if name in seconds
    }
    print("\n".join(f"{name}: {value:,.3f}" for name, value in result.items()))
    engine.close()
    return result


def matmul_peak(size: int = 8192) -> float:
    """Return the floating-point operations per second of a large bf16 matrix multiplication: the
    best of ten.
    """
    a, b = torch.randn(2, size, size, device="cuda", dtype=torch.bfloat16)
    times = []
    for _ in range(10):
        begin = clock()
        a @ b
        times.append(clock() - begin)
    return 2 * size**3 / min(times)


if __name__ == "__main__":
    raise SystemExit(main())
