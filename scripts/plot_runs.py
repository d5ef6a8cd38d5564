"""Draw a metric of several runs into one picture.

Usage: python scripts/plot_runs.py PICTURE METRIC RUN [RUN ...] [--minutes] [--log]

A RUN is a run folder, or a file of JSON lines with "step", the metric and, for --minutes,
"timing/step". Its label is the last part of its path. Metrics of evaluations are found too, such as
eval/exact_match.
"""

import argparse
import json
from itertools import accumulate
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

FILES = ("metrics.jsonl", "evaluations.jsonl")


def rows_of(run: Path) -> list[dict[str, float]]:
    """Return the rows of a run, those of steps before those of evaluations.

    Raises SystemExit if ``run`` is no run.
    """
    files = [run] if run.is_file() else [run / name for name in FILES if (run / name).is_file()]
    if not files:
        raise SystemExit(f"{run} is neither a run folder nor a file")
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def line_of(
    rows: list[dict[str, float]], metric: str, minutes: bool
) -> tuple[list[float], list[float]]:
    """Return places and values of the metric, in order of the steps. Places are steps, or minutes
    of all steps up to there.
    """
    timed = sorted((row["step"], row["timing/step"]) for row in rows if "timing/step" in row)
    seconds = accumulate(each for _, each in timed)
    place = {0: 0.0} | {step: total / 60 for (step, _), total in zip(timed, seconds, strict=True)}
    found = sorted((row["step"], row[metric]) for row in rows if metric in row)
    places = [place[step] if minutes else step for step, _ in found]
    return places, [value for _, value in found]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", type=Path, help="PNG file to write")
    parser.add_argument("metric", help="name of the metric")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folder")
    parser.add_argument("--minutes", action="store_true", help="draw over minutes, not steps")
    parser.add_argument("--log", action="store_true", help="draw powers of ten; zero stays visible")
    arguments = parser.parse_args()
    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for run in arguments.runs:
        places, values = line_of(rows_of(run), arguments.metric, arguments.minutes)
        if not values:
            raise SystemExit(f"{run} has no {arguments.metric}")
        dots = "o" if len(values) < 30 else None
        axes.plot(places, values, label=run.stem, marker=dots, markersize=4, linewidth=1.6)
    if arguments.log:
        axes.set_yscale("symlog", linthresh=1e-3)
        axes.set_ylim(bottom=-2e-4)
    else:
        axes.set_ylim(bottom=0)
    axes.set(xlabel="minutes" if arguments.minutes else "step", ylabel=arguments.metric)
    axes.grid(axis="y", color="#e2e8f0")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(arguments.picture, dpi=120)


if __name__ == "__main__":
    main()
