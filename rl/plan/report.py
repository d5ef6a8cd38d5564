"""Reports of plans, of rehearsals, and of differences between configs, as text."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from rl.config import RunConfig
from rl.config.frozen import changed_fields, frozen
from rl.errors import counted, open_file_limits
from rl.host.platform import device_type
from rl.model.hub import title_of
from rl.plan.memory import GIB, environment_workers, kv_cache, kv_sequences
from rl.plan.plan import Plan, degrees_of
from rl.plan.planned_run import PlannedRun, hosts_of
from rl.plan.speed import sizes_of
from rl.types import Place
from rl.types.rules import Effect
from rl.validation.values import values

BAR = 30
WIDTH = 48
SHOWN = 8
OPERATORS = {
    "all-gather": "allgather_base allgather all_gather_into_tensor flex_cp_allgather",
    "reduce-scatter": "reduce_scatter_base reduce_scatter_tensor flex_cp_allgather_backward",
    "all-reduce": "allreduce all_reduce",
    "all-to-all": "all_to_all_single alltoall_base shard_dim_alltoall",
}
NAMES = {name: kind for kind, names in OPERATORS.items() for name in names.split()}
"""Kinds of collectives by the names of their operators."""


def describe(name: str, plan: Plan) -> str:
    """Return the plan of config ``name`` as text for one screen."""
    head = _head(name, plan.run)
    parts = [head, _meshes(plan), _memory(plan), _push(plan), _step(plan), _verdict(plan.errors)]
    texts = ("\n".join(lines) for lines in parts)
    return "\n\n".join(text for text in texts if text)


@dataclass(frozen=True, slots=True)
class Change:
    """A field in which two configs differ."""

    mark: Effect
    change: str
    """``field: old → new``."""


def changes(before: RunConfig, after: RunConfig) -> list[Change]:
    """Return the differences between two configs, those with an effect on numerics first."""
    effects = {value.name: value.effect for config in (before, after) for value in values(config)}
    changed = [
        Change(_effect(name, effects), f"{name}: {change}")
        for name, change in changed_fields(frozen(before), after).items()
    ]
    return sorted(changed, key=lambda change: [*Effect].index(change.mark))


def _effect(name: str, effects: dict[str, Effect | None]) -> Effect:
    """Return the effect of a field, or of its section if only the frozen config has the field.

    A section that one of the configs lacks has the strongest effect of its fields.
    """
    while name and name not in effects:
        name = name.rpartition(".")[0]
    known = effects.get(name)
    if known is not None:
        return known
    prefix = f"{name}." if name else ""
    inside = {effect for field, effect in effects.items() if effect and field.startswith(prefix)}
    assert inside, f"{name} has no effect: declare one at the field"
    return min(inside, key=[*Effect].index)


def describe_changes(name: str, other: str, changes: Sequence[Change]) -> str:
    """Return the changes from config ``name`` to config ``other`` as text."""
    if not changes:
        return f"{name} and {other} are the same"
    lines = [f"{name} → {other}"]
    for mark in dict.fromkeys(change.mark for change in changes):
        lines += ["", mark, *(f"  {change.change}" for change in changes if change.mark == mark)]
    return "\n".join(lines)


def _head(name: str, run: PlannedRun) -> Iterator[str]:
    model = run.config.model
    device = run.device
    hardware = run.hardware
    sizes = sizes_of(run.shape, fuse_qkv=model.fuse_qkv)
    active = f", {_count(sizes.active)} active" if sizes.experts else ""
    weights = title_of(model.hf_path or "random weights, model.hf_path is not set")
    yield f"{name}: {_count(sizes.total)} parameters{active} ({weights})"
    what, unit = (f"{hardware.gpus} GPUs", "GPU") if run.cuda else ("CPUs", "rank")
    hosts = f"{counted(run.hosts, 'host')} of {what}"
    yield (
        f"{hosts}; {hardware.device}: {device.memory_gib:.4g} GiB a {unit}, {device.tflops:.3g} "
        f"TFLOP/s, {device.memory_gb_s:.4g} GB/s memory, {device.network_gb_s:g} GB/s network"
    )


def _meshes(plan: Plan) -> Iterator[str]:
    run = plan.run
    yield "meshes"
    for name, place in run.places.items():
        axes = degrees_of(run.roles[name])
        degrees = "  ".join(f"{axis} {degree}" for axis, degree in axes.items())
        yield f"  {name:12} {_counted(place.ranks, 'rank')}  {degrees:45}  {_seats(run, place)}"
    if run.generators:
        generator = run.rl.generator
        experts = "  whole experts" if generator.expert_parallel else ""
        tp = f"tp {generator.tensor_parallel_degree}{experts}"
        seats = list(dict.fromkeys(_seats(run, place) for place in run.generators))
        shown = "; ".join(seats[:3]) + (f"; … {seats[-1]}" if len(seats) > 3 else "")
        yield f"  {'generators':12} {_counted(generator.replicas, 'time')}  {tp:45}  {shown}"
    shared: dict[tuple[str, ...], list[str]] = {}
    for memory in plan.memories:
        if memory.kind == "device" and len(memory.ranks) > 1:
            together = tuple(dict.fromkeys(rank.role for rank in memory.ranks))
            shared.setdefault(together, []).append(memory.name)
    for roles, devices in shared.items():
        last = f" up to {devices[-1]}" if len(devices) > 1 else ""
        yield f"  {' and '.join(roles)} share {devices[0]}{last}"
    if run.shared:
        turns = [name for name in (*run.roles, "generator") if name in run.shared]
        yield f"  one at a time has memory on its devices: {', '.join(turns)}"


def _counted(number: int, noun: str) -> str:
    return f"{number:3} {noun}{'s' if number > 1 else ' '}"


def _seats(run: PlannedRun, place: Place) -> str:
    hosts = hosts_of(place)
    where = f"host {hosts[0]}" if len(hosts) == 1 else f"hosts {hosts[0]}-{hosts[-1]}"
    if not run.cuda:
        return where
    last = place.first_device + place.per_host - 1
    return f"{where} GPU {place.first_device}" + (f"-{last}" if last > place.first_device else "")


def _memory(plan: Plan) -> Iterator[str]:
    """Yield the lines on memory: one column for the fullest rank of each role."""
    run = plan.run
    roles = dict.fromkeys(rank.role for rank in plan.ranks)
    columns = [
        max(
            (rank for rank in plan.ranks if rank.role == role),
            key=lambda rank: rank.total(on_host=False),
        )
        for role in roles
    ]
    yield _row("memory of the fullest rank (~ estimated)", (rank.role for rank in columns))
    names = dict.fromkeys(
        (item.on_host, item.name, item.estimate) for rank in columns for item in rank.items
    )
    for on_host, name, estimate in sorted(names, key=itemgetter(0)):
        label = f"  {'~' if estimate else ' '} {name}{' (host)' if on_host else ''}"
        cells = []
        for rank in columns:
            sizes = [item.bytes for item in rank.named(name) if item.on_host == on_host]
            cells.append(size_text(sizes[0]) if sizes else "")
        yield _row(label, cells)
    device = f"    total of {run.device.memory_gib:.4g} GiB on the device"
    for on_host, label in ((False, device), (True, "    total on the host")):
        totals = [rank.total(on_host=on_host) for rank in columns]
        if any(totals):
            yield _row(label, map(size_text, totals))
    tightest = max(plan.memories, key=lambda memory: memory.used / memory.limit)
    yield f"  tightest: {tightest.name}, {size_text(tightest.used)} of {size_text(tightest.limit)}"
    if run.hardware.assumes_host:
        memory = f"{run.hardware.host_gib:,.0f} GiB of memory"
        yield f"  assumed: a host has {memory}; hardware.host_memory_gib says what it has"
    if (
        run.open_files > (most := open_file_limits()[1])
        and run.config.hardware.kind == device_type()
    ):
        yield f"  open files: a process needs about {run.open_files:,}; this host allows {most:,}"
    if not run.generators:
        return
    longest = run.rl.longest
    fit = kv_sequences(run, longest)
    cache = size_text(kv_cache(run))
    yield f"  {cache} of KV cache hold {fit:,} sequences of the longest {longest:,} tokens"
    if run.record_bytes:
        record = run.record_bytes
        whole = size_text(record * longest * run.sequences_sampled)
        yield f"  records of experts: {record} bytes a token, at most {whole} a step"
    if task := run.episodes:
        workers = environment_workers(run)
        where = f"{len(workers)} environment workers" if workers else "the controller's process"
        size = size_text(sum(worker.total(on_host=run.cuda) for worker in workers))
        yield (
            f"  up to {run.sequences_sampled:,} episodes at once, of at most {task.max_turns} "
            f"turns and {longest:,} tokens, in {where}{f', ~ {size} on host 0' if workers else ''}"
        )


def _row(label: str, cells: Iterable[str]) -> str:
    return label.ljust(WIDTH) + "".join(f"{cell:>12}" for cell in cells)


def _push(plan: Plan) -> Iterator[str]:
    push = plan.push
    if push is None:
        return
    over = " over the network" if push.over_network else ""
    yield f"push by {push.transport}{over}: {size_text(push.total)} in all"
    names = ("publish", "fetch", "pull")
    yield "  of the busiest rank".ljust(24) + "".join(f"{name:24}" for name in names) + "at least"
    for candidate in plan.pushes:
        moves = {
            move.what: f"{size_text(move.bytes)}, {_seconds(move.seconds)}"
            for move in candidate.stages
        }
        cells = (*(moves.get(name, "") for name in names), _seconds(candidate.seconds))
        yield f"    {candidate.transport:20}" + "".join(f"{cell:24}" for cell in cells).rstrip()
    for turn in plan.turns:
        yield (
            f"  when the devices change hands, a rank of {turn.what} moves {size_text(turn.bytes)} "
            f"to its host in {_seconds(turn.seconds)}, and back in as long"
        )


def _step(plan: Plan) -> Iterator[str]:
    step = plan.step
    samples = step.concurrency > 0
    together = f", {step.concurrency} sequences decoded together" if samples else ""
    yield (
        f"step, ~ {_seconds(step.seconds)}: {step.tokens:,} tokens, {step.tflop:,.3g} TFLOP of "
        f"gradients{together}"
    )
    for name in ("generation", "training", "push") if samples else ():
        seconds = getattr(step, name)
        filled = round(BAR * seconds / step.seconds)
        yield f"  {name:10} {_seconds(seconds):>9}  {'█' * filled}{'·' * (BAR - filled)}"
    kinds: Counter[str] = Counter()
    for collective in step.collectives:
        kinds[collective.kind] += collective.bytes
    if kinds:
        moved = ", ".join(f"{size_text(bytes)} {kind}" for kind, bytes in kinds.most_common())
        waiting = f"training waits {_seconds(step.waiting)}" if step.waiting else "no waiting"
        yield f"  collectives: {moved} in a micro-batch; {waiting}"
    if samples:
        yield f"  idle: trainer {step.trainer_idle:.0%}, generators {step.generators_idle:.0%}"
    yield from (f"  assumed: {assumption}" for assumption in step.assumptions)
    slow = plan.run.config.session().slow_products()
    yield from (f"  warning: {reason}" for reason in slow)


def _verdict(errors: Sequence[str]) -> Iterator[str]:
    yield "this cannot work" if errors else "this can work"
    yield from (f"  error: {error}" for error in errors)


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:,.1f} s"


def size_text(bytes: int) -> str:
    """Return a number of bytes in the largest unit up to GiB of which it has one."""
    units = {"GiB": GIB, "MiB": GIB >> 10, "KiB": GIB >> 20}
    name = next((name for name, unit in units.items() if bytes >= unit), "KiB")
    return f"{bytes / units[name]:.2f} {name}"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.2f} million"


def describe_rehearsal(result: dict[str, Any], run: PlannedRun, errors: list[str]) -> str:
    """Return the result of a rehearsal as text, role by role."""
    device = run.hardware.device
    lines = [f"{result['config']}: two steps of the longest sequences on a made-up {device}"]
    for role in result["roles"]:
        lines += ["", *_role(role, run)]
    assumed = dict.fromkeys(sentence for role in result["roles"] for sentence in role["assumed"])
    lines += ["", "assumed", *(f"  {sentence}" for sentence in assumed)]
    return "\n".join([*lines, "", *_verdict(errors)])


def _role(role: dict[str, Any], run: PlannedRun) -> Iterator[str]:
    yield (
        f"{role['role']} rank {role['rank']} of {role['ranks']}: {size_text(role['peak'])} at most "
        f"of {run.device.memory_gib:g} GiB; the plan says {size_text(role['planned'])}"
    )
    if chosen := role["generator"]:
        graphs = f"{len(chosen['captured'])} {chosen['graphs']}" if chosen["captured"] else "no"
        figures = (chosen["cache"], chosen["token"], role["items"].get("KV cache", 0))
        cache, token, planned = map(size_text, figures)
        yield f"  vLLM chooses {chosen['attention']} attention and {graphs} CUDA graphs"
        yield f"  KV cache of {cache}, {token} a token; the plan says {planned}"
    yield f"  {'memory':22}{'peak':>12}{'at the end':>12}"
    for phase in role["phases"]:
        sizes = (size_text(phase[name]) for name in ("peak", "after"))
        yield f"  {phase['phase']:22}" + "".join(f"{size:>12}" for size in sizes)
    yield "  largest at the peak"
    for entry in role["largest"][:SHOWN]:
        times = f"{entry['count']} x " if entry["count"] > 1 else ""
        operator = entry["operator"].removeprefix("aten.").partition(".")[0]
        line = f"{operator}, {entry['line'] or 'small'}" if operator else entry["what"]
        yield f"  {size_text(entry['bytes']):>12}  {times}{line}"
    if allocator := role["allocator"]:
        names = ("reserved", "allocated", "grown", "fixed")
        reserved, allocated, grown, fixed = (size_text(allocator[name]) for name in names)
        yield f"  allocator after {allocator['steps']} more steps of varied batches"
        yield f"    {reserved} reserved for {allocated} at most, {grown} since the second step"
        yield f"    {fixed} would be reserved without expandable segments"
    shapes = ", ".join(f"{rows} x {width}" for rows, width in role["shapes"][:SHOWN])
    yield f"  shapes of micro-batches that attention is compiled for: {shapes or 'none'}"
    yield "  collectives of the last step"
    counts: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for collective in role["collectives"]:
        if collective["phase"] in role["last"]:
            kind = NAMES.get(collective["kind"], collective["kind"])
            counts[kind] += collective["count"]
            moved[kind] += collective["bytes"]
    for kind, bytes in moved.most_common():
        yield f"  {size_text(bytes):>12}  {kind}, {counted(counts[kind], 'call')}"
    yield "  waits of the host for the device in the last step"
    for wait in role["syncs"]:
        if wait["phase"] in role["last"]:
            yield f"  {wait['count']:12}  {wait['reason']}, {wait['line']}"
