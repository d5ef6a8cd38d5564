"""Verdicts on the numbers of checks. Imports no torch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Numbers = dict[str, float]

LOGPROB_BOUNDS = {"float32": 1e-3, "bfloat16": 0.5}
"""Difference of a log-prob of trainer and generator, in nats, that rounding may cause."""

STEP_BOUNDS = {"float32": (1e-3, 1e-3), "bfloat16": (0.5, 0.1), "coarse": (2.0, 0.4)}
"""Differences of a log-prob, in nats, and of the gradient, of its norm, that rounding may cause in
one trainer. ``coarse`` is float8, or experts in bfloat16, where some tokens go to others."""

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


def of_step(
    gaps: Sequence[float], gradient: float, kind: str, exact: Sequence[float] | None, same: bool
) -> Verdict:
    """Judge a trainer's step against the CPU in float32.

    ``gaps`` are the differences of log-probs, ``gradient`` the norm of the gradient's difference
    over that of the gradient, ``exact`` the differences of log-probs from float64, and ``same``
    says whether the device's digests of the weights are those of the host. ``kind`` is a key of
    STEP_BOUNDS.
    """
    largest, most = max(gaps), STEP_BOUNDS[kind]
    wrong = []
    if not largest <= most[0]:
        wrong.append(
            f"log-probs differ by up to {largest:.2g} from the CPU; {most[0]:g} is allowed"
        )
    if not gradient <= most[1]:
        wrong.append(f"the gradient differs by {gradient:.2g} of its norm; {most[1]:g} is allowed")
    if exact is not None and not max(exact) <= most[0]:
        wrong.append(f"log-probs differ by up to {max(exact):.2g} from transformers in float64")
    if not same:
        wrong.append("the digests of the weights are others on the device than on the host")
    numbers = {"logprob_error_max": largest, "gradient_error": gradient}
    if exact is not None:
        numbers["from_float64_max"] = max(exact)
    said = f"max |Δ| {largest:.1e} from the CPU, gradient {gradient:.1e}"
    return Verdict(wrong="; ".join(wrong), said=said, numbers=numbers)


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
