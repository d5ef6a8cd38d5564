"""Plots of training curves."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rl.observe.spans import STAGES

COLORS = {
    "generate": "#0f766e",
    "score": "#d97706",
    "train": "#4338ca",
    "push": "#be123c",
    "checkpoint": "#64748b",
    "other": "#cbd5e1",
}
PANELS = {
    "Entropy, nats per token": {"entropy": ("entropy/mean", "#4338ca")},
    "Gradient norm": {"gradient norm": ("trainer/grad_norm", "#be123c")},
}
"""Lines of each panel: metric and color by label."""

REWARD = {"Reward": {"mean": ("reward/mean", "#0f766e"), "correct": ("reward/correct", "#d97706")}}
LOSS = {"Loss": {"training": ("loss/mean", "#0f766e")}}
"""First panel of a run with rewards, and of one without."""

PANELS_AHEAD = {
    "Staleness of a token, steps": {"mean": ("rollout/staleness_mean", "#7e22ce")},
    "Finished groups in the queue": {"finished": ("ledger/finished", "#0369a1")},
}
"""Panels of a run whose generators ran ahead of the trainer."""


def smoothed(values: Sequence[float], span: float) -> np.ndarray:
    """Return the centred moving average over ``span`` values, applied twice. Skips NaN."""
    half = round(span / 2)
    window = np.ones(2 * half + 1)
    smooth = np.asarray(values, dtype=float)
    for _ in range(2):
        known = np.isfinite(smooth)
        sums = np.convolve(np.where(known, smooth, 0.0), window)
        counts = np.convolve(known, window)
        means = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
        smooth = means[half : half + len(values)]
    return smooth


def series(rows: Sequence[dict], name: str) -> tuple[list[float], list[float]]:
    """Return steps and values of one metric from the rows that have it."""
    present = [row for row in rows if name in row]
    return [float(row["step"]) for row in present], [float(row[name]) for row in present]


def write_curves_png(
    path: str | Path, rows: Sequence[dict], evaluations: Sequence[dict] = ()
) -> None:
    """Plot reward or loss, entropy, gradient norm and step time over steps into a PNG file. Raw
    values are faint, smoothed values bold.

    Staleness and the queue of finished groups follow below if the run had any. ``evaluations`` are
    rows of ``RunRecord.read_evaluations``; their exact match or loss is shown as dots.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    # Not pyplot, which has global state and may need a display.
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.12, hspace=0.04, wspace=0.03)
    ahead = ("rollout/staleness_mean", "ledger/finished")
    is_ahead = any(any(series(rows, name)[1]) for name in ahead)
    figure = Figure(figsize=(11, 10 if is_ahead else 7), layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(3 if is_ahead else 2, 2, sharex=True).flat)
    has_rewards = not rows or bool(series(rows, "reward/mean")[0])
    held_out = "eval/exact_match" if has_rewards else "eval/loss"
    steps, values = series(evaluations, held_out)
    if steps:
        dots = {"color": "#1e293b", "markersize": 4, "zorder": 3}
        label = "held out, correct" if has_rewards else "held out"
        axes[0].plot(steps, values, "o", label=label, **dots)
    panels = (REWARD if has_rewards else LOSS) | PANELS
    for ax, (title, lines) in zip(axes, panels.items(), strict=False):
        _plot_lines(ax, rows, title, lines)
    _plot_times(axes[3], rows)
    for ax, (title, lines) in zip(axes[4:], PANELS_AHEAD.items(), strict=False):
        _plot_lines(ax, rows, title, lines)
        ax.set_ylim(bottom=0)
    for ax in axes[-2:]:
        ax.set_xlabel("step")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=140, format="png")


def _plot_lines(axes, rows: Sequence[dict], title: str, lines: dict[str, tuple[str, str]]) -> None:
    """Plot one line for each metric."""
    _style(axes, title)
    for label, (name, color) in lines.items():
        steps, values = series(rows, name)
        if steps:
            dot = "o" if len(steps) == 1 else None  # a line of one point is invisible
            axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
            means = smoothed(values, len(values) / 20)
            axes.plot(steps, means, color=color, linewidth=2, label=label, marker=dot)
    labels = axes.get_legend_handles_labels()[1]
    if len(labels) > 1:
        axes.legend(frameon=False, loc="best")
    if not labels:
        _mark_empty(axes)


def _plot_times(axes, rows: Sequence[dict]) -> None:
    """Plot the seconds of each step, stacked by span. The rest of a step is "other"."""
    _style(axes, "Step time, s")
    timed = [row for row in rows if "timing/step" in row]
    if not timed:
        _mark_empty(axes)
        return
    spans = {name: np.array([row.get(f"timing/{name}", 0.0) for row in timed]) for name in STAGES}
    spans = {name: seconds for name, seconds in spans.items() if seconds.any()}
    whole = np.array([row["timing/step"] for row in timed])
    spans["other"] = np.maximum(whole - sum(spans.values()), 0.0)
    colors = [COLORS[name] for name in spans]
    # Each step is a block of width 1, so that a single slow step is visible.
    edges = [row["step"] + side for row in timed for side in (-0.5, 0.5)]
    heights = [np.repeat(seconds, 2) for seconds in spans.values()]
    axes.stackplot(edges, *heights, labels=list(spans), colors=colors, linewidth=0)
    axes.set_ylim(bottom=0)
    handles, labels = axes.get_legend_handles_labels()
    above = {"loc": "lower right", "bbox_to_anchor": (1, 0.99), "ncols": len(labels)}
    tight = {"handlelength": 0.8, "handletextpad": 0.4, "columnspacing": 0.9, "borderpad": 0.2}
    axes.legend(handles, labels, **above, **tight, frameon=False, fontsize=8)


def _style(axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color="#1e293b")
    axes.grid(axis="y", color="#e2e8f0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#94a3b8")
    axes.tick_params(length=0, colors="#475569", labelsize=9)


def _mark_empty(axes) -> None:
    axes.set_yticks([])
    middle = {"ha": "center", "va": "center", "transform": axes.transAxes}
    axes.text(0.5, 0.5, "not recorded", color="#94a3b8", **middle)
