"""A gated delta net against attention of the same width, in the trainer on CPU.

Usage: python scripts/bench/delta_net.py [--rounds N] [--tiny] [--json]

Both are the layers of a tiny Qwen3.5 with their projections, in float32 on one thread: the delta
net has as many heads of values as attention has of queries, and as wide ones. Each round takes the
forward and backward pass of packed documents by both, by turns. Prints the CPU time of each, and
the median of the rounds' ratios.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from rl.model.decoder import decoder_config
from rl.model.shape import ModelConfig, shape_of
from rl.training.attention import DenseAttention
from rl.training.documents import Documents

CASES = {
    "16 documents of 128 tokens, 4 heads of 32": ([128] * 16, 4, 32),
    "32 documents of 12 to 150 tokens, 4 heads of 32": (
        [20, 40, 60, 33, 97, 150, 12, 64] * 4,
        4,
        32,
    ),
    "16 documents of 128 tokens, 8 heads of 128": ([128] * 16, 8, 128),
    "1 document of 2,048 tokens, 8 heads of 128": ([2048], 8, 128),
    "1 document of 8,192 tokens, 8 heads of 32": ([8192], 8, 32),
}
"""Lengths of documents, number of heads and their width."""


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often both take turns")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    parser.add_argument("--tiny", action="store_true", help="the first case alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    cases = [*CASES.items()][: 1 if arguments.tiny else None]
    for name, (lengths, heads, width) in cases:
        delta, attention = passes(lengths, heads, width)
        times = [(seconds(delta), seconds(attention)) for _ in range(arguments.rounds + 1)][1:]
        own, other = (statistics.median(side) for side in zip(*times, strict=True))
        ratio = statistics.median(one / two for one, two in times)
        print(f"{name}: {own * 1e3:,.0f} ms, attention {other * 1e3:,.0f} ms, {ratio:.2f} x")
        rows.append({"case": name, "delta_over_attention": ratio})
    if arguments.json:
        worst = max(row["delta_over_attention"] for row in rows)
        print(json.dumps({"delta_over_attention_max": worst, "cases": rows}))


def passes(lengths: list[int], heads: int, width: int) -> tuple[Callable[[], None], ...]:
    """Return forward and backward pass of a layer's delta net, and of its attention."""
    sizes = {"n_heads": heads, "n_kv_heads": heads, "head_dim": width, "dim": heads * width}
    config = ModelConfig(**sizes, n_layers=2, max_seq_len=sum(lengths), family="qwen3_5_text")
    model = decoder_config(
        shape_of(config), fuse_qkv=True, inner_attention=DenseAttention.Config()
    ).build()
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
    positions = torch.cat([*map(torch.arange, lengths)])[None]
    documents = Documents(positions)
    inputs = torch.randn(1, sum(lengths), heads * width, requires_grad=True)
    net, attention = model.layers["0"].delta_net, model.layers["1"].attention

    return (
        lambda: net(inputs, positions).sum().backward(),
        lambda: attention(inputs, documents, positions).sum().backward(),
    )


def seconds(compute: Callable[[], None]) -> float:
    """Return the CPU seconds of a call."""
    start = time.process_time()
    compute()
    return time.process_time() - start


if __name__ == "__main__":
    main()
