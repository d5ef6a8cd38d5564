"""Peak memory of log-probs and entropies with their backward pass: the trainer's head, and plain
PyTorch.
"""

import resource
from pathlib import Path

import torch
from ranks import on_ranks

from rl.training.logprobs import LogProbHead
from rl.training.trainer_config import TrainerConfig

WIDTH = 64
DEFAULT_MIB = TrainerConfig().logits_mib
SMALL_MIB = 64
SIDES = {
    "naive": ("log_softmax of all logits", None, "#be123c"),
    "ours": (f"Tiller, logits_mib={DEFAULT_MIB}", DEFAULT_MIB, "#0f766e"),
    "small": (f"Tiller, logits_mib={SMALL_MIB}", SMALL_MIB, "#4338ca"),
}
"""Each side's label, the MiB of logits that its head may hold at once, and its color."""


def compare_memory(tokens: int, vocab_size: int, plot: str | None) -> dict[str, float]:
    """Return the memory of plain PyTorch over ours. ``plot`` names a plot over smaller vocabularies
    too.
    """
    sizes = [vocab_size * eighths // 8 for eighths in ((1, 2, 4, 6, 8) if plot else (8,))]
    peaks: dict[str, list[float]] = {side: [] for side in SIDES}
    for size in sizes:
        print(f"log-probs of {tokens:,} tokens, vocabulary {size:,}:", end="", flush=True)
        for side, (label, logits_mib, _) in SIDES.items():
            peaks[side] += on_ranks(1, peak_mib, tokens, size, logits_mib)
            print(
                f"{', ' if side != 'naive' else ' '}{peaks[side][-1]:,.0f} MiB by {label}",
                end="",
                flush=True,
            )
        print()
    if plot:
        draw_peaks(plot, tokens, sizes, peaks)
    naive, ours, small = (peaks[side][-1] for side in SIDES)
    return {
        "naive_over_ours_logprob_memory": naive / ours,
        "naive_over_ours_logprob_memory_small_chunks": naive / small,
    }


def peak_mib(tokens: int, vocab_size: int, logits_mib: int | None) -> float:
    """Return the MiB of resident memory that one forward and backward pass adds to this process at
    its peak.

    ``logits_mib`` is the limit of the LogProbHead; None stands for plain PyTorch.
    """
    head = LogProbHead.Config(
        in_features=WIDTH, out_features=vocab_size, logits_mib=logits_mib or 1
    ).build()
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, tokens, WIDTH, generator=draw)
    targets = torch.randint(vocab_size, (1, tokens), generator=draw)

    def run(count: int) -> None:
        some = hidden[:, :count].requires_grad_()
        wanted = targets[:, :count]
        logprobs, entropy = (
            plain(some, head.weight, wanted) if logits_mib is None else head(some, wanted, 1.0)
        )
        (logprobs + 0.01 * entropy).sum().backward()
        head.weight.grad = None

    run(2)  # loads the kernels
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    run(tokens)
    return (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - pages * resource.getpagesize() / 1024
    ) / 1024


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and entropies in plain PyTorch."""
    every = torch.log_softmax(hidden @ weight.T, dim=-1)
    return every.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(every.exp() * every).sum(-1)


def draw_peaks(path: str, tokens: int, sizes: list[int], peaks: dict[str, list[float]]) -> None:
    """Write a PNG file of the peaks, in GiB, over vocabulary sizes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for side, (label, _, color) in SIDES.items():
        axes.plot(
            sizes,
            [mib / 1024 for mib in peaks[side]],
            color=color,
            linewidth=2,
            marker="o",
            label=label,
        )
    title = f"Peak memory of log-probs and their gradients, {tokens:,} tokens, GiB"
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color="#1e293b")
    axes.set_xlabel("vocabulary")
    axes.set_xticks(sizes, [f"{size / 1000:.0f} k" for size in sizes])
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper left")
    axes.grid(axis="y", color="#e2e8f0", linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#94a3b8")
    axes.tick_params(length=0, colors="#475569", labelsize=9)
    figure.savefig(path, dpi=140, format="png")
