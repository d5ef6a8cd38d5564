"""Verdicts on the numbers of checks. Imports no torch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Numbers = dict[str, float]

LOGPROB_BOUNDS = {"float32": 1e-3, "bfloat16": 0.5}
"""Difference of a log-prob of trainer and generator, in nats, that rounding may cause."""

MEAN_SHARE = 0.1
"""Share of that bound which the mean over all tokens may reach."""

LEAST_MOVE = 0.1
"""Change of a log-prob, in nats, by which a generator with older weights is told from rounding."""

STALE_SHARE = 0.25
"""Share of that change which differences between generator and trainer may reach."""

SLACK_GIB = 4.0
"""Memory of CUDA contexts, libraries and fragments on a GPU of two processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of a check."""

    wrong: str = ""
    """Sentence of what is wrong; empty if the check is ok."""
    skipped: str = ""
    """Reason why the check did not run; empty if it did."""
    said: str = ""
    """Figures to print."""
    numbers: Numbers = field(default_factory=dict)

    @property
    def state(self) -> str:
        """``ok``, ``FAIL`` or ``skipped``."""
        return "FAIL" if self.wrong else "skipped" if self.skipped else "ok"


def of_parity(gaps: Sequence[float], dtype: str, findings: Sequence[str]) -> Verdict:
    """Judge the differences of log-probs of sampled tokens between trainer and generator.

    ``findings`` are those of the comparison by modules, the first cause first.
    """
    largest = max(gaps)
    mean = sum(gaps) / len(gaps)
    bound = LOGPROB_BOUNDS[dtype]
    wrong = "; ".join(findings)
    if not wrong and not (largest <= bound and mean <= MEAN_SHARE * bound):
        wrong = (
            f"log-probs differ by up to {largest:.2g} and on average by {mean:.2g}; {dtype} "
            f"explains {bound:g} and {MEAN_SHARE * bound:g}"
        )
    return Verdict(
        wrong=wrong,
        said=f"max |Δ| {largest:.1e}, mean {mean:.1e} over {len(gaps)} tokens",
        numbers={"logprob_error_max": largest, "logprob_error_mean": mean, "tokens": len(gaps)},
    )


def of_push(differing: Sequence[str], seconds: Sequence[float], size: float) -> Verdict:
    """Judge pushes of ``size`` bytes that took these times with their checks.

    ``differing`` are the parameters of the generator that are not the trainer's.
    """
    wrong = ""
    if differing:
        count = f"{len(differing)} of the generator's parameters"
        wrong = f"{count} differ from the trainer's; the first is {differing[0]}"
    fastest = min(seconds)
    return Verdict(
        wrong=wrong,
        said=f"{len(seconds)} pushes of {size / 1e9:.3g} GB, {fastest:.2f} s with digests",
        numbers={"push_bytes": size, "push_s": fastest, "push_gb_s": size / 1e9 / fastest},
    )


def used_memory(text: str) -> float:
    """Return the used memory of the first GPU in GiB from the answer of ``nvidia-smi
    --query-gpu=memory.used --format=csv,noheader,nounits``.
    """
    lines = text.split("\n")
    if not re.fullmatch(r"\s*\d+\s*", lines[0]):
        raise ValueError(f"nvidia-smi answered {lines[0]!r} instead of a number of MiB")
    return int(lines[0]) / 1024


def of_memory(readings: Mapping[str, float], sizes: Mapping[str, float]) -> Verdict:
    """Judge the used memory of a GPU, in GiB, while it is ``idle`` and while each model has it
    alone. ``sizes`` are those of the models.
    """
    wrong = []
    for model, size in sizes.items():
        allowed = readings["idle"] + size + SLACK_GIB
        if readings[model] > allowed:
            others = " and ".join(each for each in sizes if each != model)
            wrong.append(
                f"{readings[model]:.1f} GiB are used while the {model} alone has the GPU, and "
                f"{allowed:.1f} are explained: the {others} did not give its memory back"
            )
    said = ", ".join(f"{name} {value:.1f}" for name, value in readings.items())
    numbers = {f"gib_{name}": value for name, value in readings.items()}
    return Verdict(wrong="; ".join(wrong), said=f"GiB used: {said}", numbers=numbers)


def of_changed_weights(moved: float, gaps: Sequence[float]) -> Verdict:
    """Judge a generator with graphs after a push.

    ``moved`` is how far the trainer's log-probs of the tokens of before moved; ``gaps`` are the
    differences between generator and trainer after the push, which are as large if the generator
    computes with the weights of before.
    """
    largest = max(gaps)
    wrong = ""
    if not moved > LEAST_MOVE:
        wrong = f"the step moved log-probs by {moved:.2g} only, so that nothing can be told"
    elif not largest <= STALE_SHARE * moved:
        wrong = (
            f"log-probs differ by {largest:.2g} after a push that moved them by {moved:.2g}: the "
            "graphs compute with other weights, or another kernel"
        )
    return Verdict(
        wrong=wrong,
        said=f"max |Δ| {largest:.1e} after a push that moved log-probs by {moved:.1e}",
        numbers={"logprob_error_max": largest, "moved": moved},
    )


def of_float8(gaps: Sequence[float], losses: Sequence[float]) -> Verdict:
    """Judge a float8 model by its log-probs against those of the same weights in bfloat16, and by
    its losses on one batch.
    """
    largest = max(gaps)
    mean = sum(gaps) / len(gaps)
    wrong = ""
    if largest == 0:
        wrong = "log-probs are those of bfloat16, bit for bit: float8 is not used"
    elif not mean <= LOGPROB_BOUNDS["bfloat16"]:
        wrong = f"log-probs differ from those of bfloat16 by {mean:.2g} on average"
    elif not losses[-1] < losses[0]:
        wrong = f"the loss on one batch went from {losses[0]:.4g} to {losses[-1]:.4g}"
    return Verdict(
        wrong=wrong,
        said=f"mean |Δ| {mean:.1e} from bfloat16, loss {losses[0]:.3f} to {losses[-1]:.3f}",
        numbers={"logprob_error_max": largest, "logprob_error_mean": mean, "loss": losses[-1]},
    )


def of_run(rows: Sequence[Mapping[str, float]], steps: int, dtype: str) -> Verdict:
    """Judge the metrics of a run of ``steps`` steps."""
    wrong = ""
    found = [int(row["step"]) for row in rows]
    drift = max((row.get("logprob/error_max", 0.0) for row in rows), default=0.0)
    if found != [*range(1, steps + 1)]:
        wrong = f"metrics.jsonl has the steps {found}; they should be 1 to {steps}, once each"
    elif bad := sorted({name for row in rows for name, value in row.items() if value != value}):
        wrong = f"{', '.join(bad)} became NaN"
    elif not drift <= LOGPROB_BOUNDS[dtype]:
        wrong = f"log-probs of generator and trainer differ by {drift:.2g} in the run"
    last = rows[-1] if rows else {}
    shown = {
        "reward": last.get("reward/mean", 0.0),
        "step_s": last.get("timing/step", 0.0),
        "tokens_per_s": last.get("tokens_per_s", 0.0),
        "logprob_error_max": drift,
    }
    said = ", ".join(f"{name} {value:.3g}" for name, value in shown.items())
    return Verdict(wrong=wrong, said=said, numbers=shown)
