"""The model of torch's allocator reserves what torch's own would, and shows fragments."""

import random
import re
from pathlib import Path

import pytest
import torch

from rl.plan.rehearsal import device_ledger
from rl.plan.rehearsal.device_ledger import Allocator, after_steps
from tests.plan.rehearsal.layouts import DENSE, EXPERTS

MIB = 1 << 20


def test_its_sizes_are_those_of_the_installed_torch():
    header = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"
    found = dict(re.findall(r"(\w+)(?: = |\{)(\d+)[;}]", header.read_text()))
    names = {
        "BLOCK": "kMinBlockSize",
        "SMALL": "kSmallSize",
        "SMALL_SEGMENT": "kSmallBuffer",
        "LARGE_SEGMENT": "large_segment_size_",
        "OWN_SEGMENT": "kMinLargeAlloc",
        "OWN_MULTIPLE": "kRoundLarge",
    }
    assert {name: getattr(device_ledger, name) for name in names} == {
        name: int(found[theirs]) for name, theirs in names.items()
    }


@pytest.mark.parametrize(
    ("sizes", "fixed", "expandable"),
    [
        ([0.5], 2, 2),  # segments of small tensors
        ([1, 1], 2, 2),
        ([1, 1, 0.1], 4, 4),
        ([1.5], 20, 20),  # of larger ones
        ([9, 9], 20, 20),
        ([9, 9, 9], 40, 40),
        ([10.5], 12, 20),  # a fixed one of its own
        ([31], 32, 40),
        ([31, 9], 52, 40),
        ([31, -31, 20], 32, 40),  # what is freed is used again
        ([31, -31, 33], 66, 40),  # an expandable segment grows
        ([5, 5, 5, -5, 6], 40, 40),  # between two tensors stays room that is too small
        ([9, 31, -31, 9], 52, 40),  # the smallest block that is large enough
        ([9, 31, -31, 5, 26], 52, 40),
        ([31, 2, -31, 5, 27], 52, 60),  # not first the end of a segment, which can grow
    ],
)
def test_segments_are_reserved_by_the_rules_of_torch(sizes, fixed, expandable):
    """Sizes in MiB are allocated, or freed if negative."""
    events = []
    for key, size in enumerate(sizes):
        if size > 0:
            events.append((key, int(size * MIB), 0))
        else:
            events.append((sizes.index(-size), 0, 0))
    assert reserved(events, expandable=False) == fixed
    assert reserved(events, expandable=True) == expandable


def reserved(events, *, expandable):
    memory = Allocator(expandable=expandable)
    memory.follow(events)
    return memory.reserved / MIB


def test_streams_share_no_memory():
    events = [(1, 30 * MIB, 7), (1, 0, 0), (2, 30 * MIB, 8)]
    assert (reserved(events, expandable=True), reserved(events[:2], expandable=True)) == (80, 40)


@pytest.mark.parametrize("expandable", [False, True])
def test_no_memory_is_lost(expandable):
    draw = random.Random(0)
    memory = Allocator(expandable=expandable)
    live = {}
    for key in range(5000):
        if live and draw.random() < 0.5:
            gone = draw.choice([*live])
            del live[gone]
            memory.follow([(gone, 0, 0)])
        else:
            live[key] = int(2 ** draw.uniform(4, 26))
            memory.follow([(key, live[key], draw.randrange(2))])
        assert sum(live.values()) <= memory.allocated <= memory.reserved
    memory.follow((key, 0, 0) for key in live)
    assert memory.allocated == 0 < memory.most_allocated <= memory.reserved
    assert all(sum(pool._sizes.values()) == pool.reserved for pool in memory._pools.values())
    assert not expandable or all(len(pool._sizes) == 1 for pool in memory._pools.values())


def test_steps_of_growing_tensors_fragment_fixed_segments_only():
    """Tensors of a step may be larger than those of the steps before."""
    first = [(1, 31 * MIB, 0)]
    steps = [[(10 + n, (32 + 2 * n) * MIB, 0), (10 + n, 0, 0)] for n in range(8)]
    fixed, grown = (after_steps(first, steps, 40, expandable=kind) for kind in (False, True))
    assert (fixed["reserved"], grown["reserved"]) == (122 * MIB, 80 * MIB)
    assert (fixed["grown"], grown["grown"]) == (90 * MIB, 40 * MIB)


@pytest.mark.parametrize("arguments", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.long
def test_a_rehearsal_says_what_is_reserved_for_varied_batches(arguments, rehearsals):
    arguments = arguments.replace("n_layers 2", "n_layers 1")
    found = rehearsals.of(arguments, allocated=40)
    assert found["error"] is None
    memory = found["allocator"]
    assert found["peak"] <= memory["allocated"] <= min(memory["reserved"], memory["fixed"])
    assert memory["reserved"] <= 1.3 * memory["allocated"]
    assert {each["phase"] for each in found["phases"]} == {
        "init",
        *(f"{call} {step}" for call in ("forward_backward", "optim_step") for step in (1, 2)),
    }
