"""Report of a rehearsal as text."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from rl.errors import counted
from rl.plan.planned_run import PlannedRun
from rl.plan.report import size_text

SHOWN = 8
NAMES = {
    "allgather_base": "all-gather",
    "allgather": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_base": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "all_to_all_single": "all-to-all",
    "alltoall_base": "all-to-all",
    "shard_dim_alltoall": "all-to-all",
    "flex_cp_allgather": "all-gather",
    "flex_cp_allgather_backward": "reduce-scatter",
}


def describe(result: dict[str, Any], run: PlannedRun, errors: list[str]) -> str:
    """Return the result of a rehearsal as text, role by role."""
    device = run.hardware.device
    lines = [f"{result['config']}: two steps of the longest sequences on a made-up {device}"]
    for role in result["roles"]:
        lines += ["", *_role(role, run)]
    assumed = dict.fromkeys(each for role in result["roles"] for each in role["assumed"])
    lines += ["", "assumed", *(f"  {each}" for each in assumed)]
    verdict = "this cannot work" if errors else "this can work"
    return "\n".join([*lines, "", verdict, *(f"  error: {error}" for error in errors)])


def _role(role: dict[str, Any], run: PlannedRun) -> Iterator[str]:
    yield (
        f"{role['role']} rank {role['rank']} of {role['ranks']}: {size_text(role['peak'])} at most "
        f"of {run.device.memory_gib:g} GiB; the plan says {size_text(role['planned'])}"
    )
    yield f"  {'memory':22}{'peak':>12}{'at the end':>12}"
    for phase in role["phases"]:
        sizes = (size_text(phase[name]) for name in ("peak", "after"))
        yield f"  {phase['phase']:22}" + "".join(f"{size:>12}" for size in sizes)
    yield "  largest at the peak"
    for each in role["largest"][:SHOWN]:
        times = f"{each['count']} x " if each["count"] > 1 else ""
        operator = each["operator"].removeprefix("aten.").partition(".")[0]
        line = f"{operator}, {each['line'] or 'small'}" if operator else each["what"]
        yield f"  {size_text(each['bytes']):>12}  {times}{line}"
    yield "  collectives of the last step"
    counts, sizes_of_kind = _collectives(role)
    for kind, bytes in sizes_of_kind.most_common():
        yield f"  {size_text(bytes):>12}  {kind}, {counted(counts[kind], 'call')}"
    yield "  waits of the host for the device in the last step"
    for each in role["syncs"]:
        if _is_last(each["phase"]):
            yield f"  {each['count']:12}  {each['reason']}, {each['line']}"


def _collectives(role: dict[str, Any]) -> tuple[Counter[str], Counter[str]]:
    """Return the number and the bytes of the last step's collectives, by kind."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for each in role["collectives"]:
        if _is_last(each["phase"]):
            kind = NAMES.get(each["kind"], each["kind"])
            counts[kind] += each["count"]
            sizes[kind] += each["bytes"]
    return counts, sizes


def _is_last(phase: str) -> bool:
    return phase.endswith(" 2")
