"""The picture of weight_push.py: transports against a plain copy, and time against bytes."""

from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

BARS = {"publish": "#9ab8d6", "fetch and pull": "#2f6db0"}


def draw(path: str, result: dict[str, Any]) -> None:
    """Write the picture of a result with both tables to ``path``."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    transports = result["transports"]
    pulls = [row["pull_over_memcpy"] for row in transports.values()]
    totals = [row["total_over_memcpy"] for row in transports.values()]
    left.barh(list(transports), totals, color=BARS["publish"], label="publish")
    left.barh(list(transports), pulls, color=BARS["fetch and pull"], label="fetch and pull")
    for place, total in enumerate(totals):
        left.text(total * 1.05, place, f"{total:.1f}", va="center")
    left.set_xscale("log")
    left.set_xlim(0.5, 2.5 * max(totals))
    left.axvline(1, color="gray", linestyle=":")
    left.set_xlabel(f"time over that of a plain copy of {result['bytes'] / 1e9:.2f} GB")
    left.invert_yaxis()
    left.legend(loc="upper right", frameon=False)

    alone = [row for row in result["sizes"] if row["generators"] == 1]
    for name, color in BARS.items():
        key = "publish_s" if name == "publish" else "pull_s"
        right.plot(
            [r["bytes"] / 1e9 for r in alone],
            [r[key] * 1e3 for r in alone],
            marker="o",
            color=color,
            label=name,
        )
    for row in alone:
        right.annotate(
            row["model"],
            (row["bytes"] / 1e9, row["publish_s"] * 1e3),
            (0, 6),
            textcoords="offset points",
        )
    right.set_xlabel("GB pushed over shared memory, FSDP2 x TP2 to TP2")
    right.set_ylabel("milliseconds")
    right.set_ylim(bottom=0)
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
