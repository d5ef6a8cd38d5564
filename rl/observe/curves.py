"""Training curves: in the terminal, and as a picture."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

from rl.observe.spans import STAGES

DOTS = (
    (0x01, 0x08),
    (0x02, 0x10),
    (0x04, 0x20),
    (0x40, 0x80),
)  # braille: four rows of two dots a cell
COLORS = {
    "reward": "#0f766e",
    "correct": "#d97706",
    "entropy": "#4338ca",
    "gradient": "#be123c",
    "staleness": "#7e22ce",
    "waiting": "#0369a1",
    "held out": "#1e293b",
    "generate": "#0f766e",
    "score": "#d97706",
    "train": "#4338ca",
    "push": "#be123c",
    "checkpoint": "#64748b",
    "other": "#cbd5e1",
}


def smoothed(values: list[float], span: float) -> list[float]:
    """Centred moving average over ``span`` values, twice: no lag, no corners.

    NaN is passed over.
    """
    half = round(span / 2)
    for _ in range(2):
        sums = [0.0]
        counts = [0]
        for value in values:
            finite = math.isfinite(value)
            sums.append(sums[-1] + (value if finite else 0.0))
            counts.append(counts[-1] + finite)
        windows = [
            (max(place - half, 0), min(place + half + 1, len(values)))
            for place in range(len(values))
        ]
        values = [_mean_between(sums, counts, start, end) for start, end in windows]
    return values


def _mean_between(sums: list[float], counts: list[int], start: int, end: int) -> float:
    count = counts[end] - counts[start]
    return (sums[end] - sums[start]) / count if count else math.nan


def series(rows: list[dict], name: str) -> tuple[list[float], list[float]]:
    """Steps and values of one metric, of the rows that have it."""
    have = [row for row in rows if name in row]
    return [float(row["step"]) for row in have], [float(row[name]) for row in have]


def reward_curve_text(rows: list[dict], width: int = 72, height: int = 14) -> str:
    """Mean reward over steps, smoothed, drawn in ``height`` lines of at most ``width`` characters.

    ``rows`` are the metrics of a run, each with ``step`` and ``reward/mean``.
    """
    steps, rewards = series(rows, "reward/mean")
    points = [
        (x, y)
        for x, y in zip(steps, smoothed(rewards, len(rewards) / 20), strict=True)
        if math.isfinite(y)
    ]
    if not points:
        return "no rewards yet"
    low, high = _round_limits(min(y for _, y in points), max(y for _, y in points))
    lines_of_plot = max(height - 3, 3)
    places = _tick_places(lines_of_plot)
    labels = {
        place: _label(high - (high - low) * place / (lines_of_plot - 1), high - low)
        for place in places
    }
    margin = max(len(label) for label in labels.values())
    columns = max(width - margin - 2, 8)
    canvas = _draw(points, columns, lines_of_plot, low, high)
    title = f"mean reward per step, smoothed: {points[0][1]:.3f} → {points[-1][1]:.3f}"
    text = [" " * (margin + 2) + title]
    for place, line in enumerate(canvas):
        text.append(
            f"{labels.get(place, ''):>{margin}} {'┤' if place in labels else '│'}{line}".rstrip()
        )
    text.append(" " * margin + " └" + "─" * columns)
    text.append(" " * (margin + 2) + _step_axis(int(points[0][0]), int(points[-1][0]), columns))
    return "\n".join(text)


def _round_limits(low: float, high: float) -> tuple[float, float]:
    """The range to draw: [0, 1] where it suits, else round numbers around the data."""
    if low >= 0 and 0.5 <= high <= 1:
        return 0.0, 1.0
    unit = 10 ** math.floor(math.log10(max(high - low, abs(high) * 0.05, 1e-9)))
    bottom = math.floor(low / unit) * unit
    top = math.ceil(high / unit) * unit
    return (bottom, top) if top > bottom else (bottom, bottom + unit)


def _tick_places(lines: int) -> list[int]:
    """Lines that carry a label: first, last, and those between at even distances."""
    parts = next(
        (parts for parts in (4, 5, 3, 2) if (lines - 1) % parts == 0 and (lines - 1) // parts >= 2),
        1,
    )
    return [place * (lines - 1) // parts for place in range(parts + 1)]


def _label(value: float, extent: float) -> str:
    decimals = max(0, min(6, 2 - math.floor(math.log10(extent))))
    return f"{value:.{decimals}f}"


def _draw(
    points: list[tuple[float, float]], columns: int, lines: int, low: float, high: float
) -> list[str]:
    """A line through ``points`` in braille, two dots wide and four high a character."""
    cells = [[0] * columns for _ in range(lines)]
    first = points[0][0]
    last = points[-1][0]
    before = None
    for across in range(columns * 2):
        value = _value_at(points, first + (last - first) * across / (columns * 2 - 1))
        # Tick labels stand at the middle of their line, so values do too.
        down = round((high - value) / (high - low) * (lines - 1) * 4 + 1.5)
        down = min(max(down, 0), lines * 4 - 1)
        before = down if before is None else before
        for row in range(min(down, before), max(down, before) + 1):
            cells[row // 4][across // 2] |= DOTS[row % 4][across % 2]
        before = down
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in line) for line in cells]


def _value_at(points: list[tuple[float, float]], x: float) -> float:
    place = bisect_left(points, x, key=lambda point: point[0])
    if place == 0 or place == len(points):
        return points[min(place, len(points) - 1)][1]
    (x0, y0) = points[place - 1]
    (x1, y1) = points[place]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _step_axis(first: int, last: int, columns: int) -> str:
    left = f"step {first}"
    right = str(last)
    return left + right.rjust(columns - len(left)) if last > first else left


def write_curves_png(path: str | Path, rows: list[dict], evaluations: Sequence[dict] = ()) -> None:
    """Reward, entropy, gradient norm and step time over steps, as a PNG file; faint raw, bold
    smoothed.

    Below them staleness, and finished groups that wait to be trained on, where there were any. The
    exact match of ``evaluations``, rows as ``RunRecord.read_evaluations`` gives them, is drawn as
    dots among the rewards.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    # A figure of its own, not pyplot's: no global state, no display.
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.12, hspace=0.04, wspace=0.03)
    is_ahead = any(
        any(series(rows, name)[1]) for name in ("rollout/staleness_mean", "ledger/finished")
    )
    figure = Figure(figsize=(11, 10 if is_ahead else 7), layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(3 if is_ahead else 2, 2, sharex=True).flat)
    reward, entropy, gradient, times = panels[:4]
    steps, exact = series(list(evaluations), "eval/exact_match")
    if steps:
        reward.plot(
            steps,
            exact,
            "o",
            color=COLORS["held out"],
            markersize=4,
            label="held out, correct",
            zorder=3,
        )
    _plot_lines(
        reward,
        rows,
        "Reward",
        {"mean": ("reward/mean", "reward"), "correct": ("reward/correct", "correct")},
    )
    _plot_lines(entropy, rows, "Entropy, nats per token", {"entropy": ("entropy/mean", "entropy")})
    _plot_lines(
        gradient, rows, "Gradient norm", {"gradient norm": ("trainer/grad_norm", "gradient")}
    )
    _plot_times(times, rows)
    if is_ahead:
        _plot_lines(
            panels[4],
            rows,
            "Staleness of a token, steps",
            {"mean": ("rollout/staleness_mean", "staleness")},
        )
        _plot_lines(
            panels[5],
            rows,
            "Finished groups in the queue",
            {"finished": ("ledger/finished", "waiting")},
        )
        for axes in panels[4:]:
            axes.set_ylim(bottom=0)
    for axes in panels[-2:]:
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=140, format="png")


def _plot_lines(axes, rows: list[dict], title: str, lines: dict[str, tuple[str, str]]) -> None:
    """One line a metric, over what was drawn before."""
    _dress(axes, title)
    for label, (name, color) in lines.items():
        steps, values = series(rows, name)
        if steps:
            dot = "o" if len(steps) == 1 else None  # a line of one point would not be seen
            axes.plot(steps, values, color=COLORS[color], alpha=0.25, linewidth=1)
            means = smoothed(values, len(values) / 20)
            axes.plot(steps, means, color=COLORS[color], linewidth=2, label=label, marker=dot)
    labels = axes.get_legend_handles_labels()[1]
    if len(labels) > 1:
        axes.legend(frameon=False, loc="best")
    if not labels:
        _say_empty(axes)


def _plot_times(axes, rows: list[dict]) -> None:
    """Seconds of each step, stacked by span; what no span accounts for is "other"."""
    _dress(axes, "Step time, s")
    timed = [row for row in rows if "timing/step" in row]
    if not timed:
        _say_empty(axes)
        return
    spans = {name: [row.get(f"timing/{name}", 0.0) for row in timed] for name in STAGES}
    spans = {name: seconds for name, seconds in spans.items() if any(seconds)}
    known = [sum(parts) for parts in zip(*spans.values(), strict=True)] or [0.0] * len(timed)
    spans["other"] = [
        max(row["timing/step"] - seconds, 0.0) for row, seconds in zip(timed, known, strict=True)
    ]
    colors = [COLORS[name] for name in spans]
    # Each step is a block as wide as itself, so that a lone slow step can be seen.
    edges = [row["step"] + side for row in timed for side in (-0.5, 0.5)]
    heights = [[second for second in seconds for _ in range(2)] for seconds in spans.values()]
    axes.stackplot(edges, *heights, labels=list(spans), colors=colors, linewidth=0)
    axes.set_ylim(bottom=0)
    handles, labels = axes.get_legend_handles_labels()
    above = {"loc": "lower right", "bbox_to_anchor": (1, 0.99), "ncols": len(labels)}
    tight = {"handlelength": 0.8, "handletextpad": 0.4, "columnspacing": 0.9, "borderpad": 0.2}
    axes.legend(handles, labels, **above, **tight, frameon=False, fontsize=8)


def _dress(axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color="#1e293b")
    axes.grid(axis="y", color="#e2e8f0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#94a3b8")
    axes.tick_params(length=0, colors="#475569", labelsize=9)


def _say_empty(axes) -> None:
    axes.set_yticks([])
    axes.text(
        0.5,
        0.5,
        "not recorded",
        transform=axes.transAxes,
        ha="center",
        va="center",
        color="#94a3b8",
    )
