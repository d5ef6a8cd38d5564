import gc
import math
import sys
from collections import Counter

import pytest

from rl.observe import spans
from rl.observe.events import Events
from rl.observe.spans import Stopwatch


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("rl.observe.spans.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("rl.observe.spans.time.time", lambda: now[0])
    return now


def test_spans_of_one_name_add_up_and_a_lap_covers_the_step_and_resets_all(clock):
    watch = Stopwatch()
    for _ in range(2):
        with watch.span("generate"):
            clock[0] += 2.0
    with watch.span("train"):
        clock[0] += 1.0
    clock[0] += 0.5
    spans = {"timing/generate": 4.0, "timing/train": 1.0}
    assert watch.lap() == spans | {"timing/step": 5.5, "timing/hidden": 0.0}
    clock[0] += 3.0
    assert watch.lap() == {"timing/step": 3.0, "timing/hidden": 0.0}


def test_a_span_is_an_event_with_its_process_its_times_and_its_step(clock):
    """Overlapping spans of one name are one event, and a lap cuts a span that goes on."""
    seen = []
    watch = Stopwatch(Events(seen.append))
    watch.step = 7
    with watch.span("train"), watch.span("optim_step", "trainer"):
        clock[0] += 2.0
    assert "timing/optim_step" not in watch.lap()
    with watch.span("generate"):
        clock[0] += 1.0
        with watch.span("generate"):
            clock[0] += 1.0
        clock[0] += 1.0
        watch.lap()
        watch.step = 8
        clock[0] += 4.0
    names = ("process", "name", "begin", "end", "step")
    assert [tuple(event[name] for name in names) for event in seen] == [
        ("trainer", "optim_step", 100.0, 102.0, 7),
        ("controller", "train", 100.0, 102.0, 7),
        ("controller", "generate", 102.0, 105.0, 7),
        ("controller", "generate", 105.0, 109.0, 8),
    ]
    assert watch.lap()["timing/generate"] == 4.0


def test_a_span_that_raises_counts(clock):
    watch = Stopwatch()
    with pytest.raises(RuntimeError), watch.span("train"):
        clock[0] += 1.0
        raise RuntimeError
    assert watch.lap()["timing/train"] == 1.0


def test_hidden_is_the_time_that_overlap_saves(clock):
    """train 0 to 6, generate 1 to 4, push 3 to 8: fourteen seconds' work from 0 to 8."""
    watch = Stopwatch()
    spans = {"train": (0, 6), "generate": (1, 4), "push": (3, 8), "push_wait": (6, 8)}
    entered = {name: watch.span(name) for name in spans}
    for second in range(9):
        clock[0] = 100.0 + second
        for name, (start, end) in spans.items():
            if second == start:
                entered[name].__enter__()
            if second == end:
                entered[name].__exit__(None, None, None)
    clock[0] += 1.0
    lap = watch.lap()
    assert (lap["timing/hidden"], lap["timing/step"]) == (6.0, 9.0)
    assert lap["timing/train"] + lap["timing/generate"] + lap["timing/push"] == 6.0 + 8.0


def test_a_stage_across_a_lap_counts_its_hidden_time_in_each_step(clock):
    watch = Stopwatch()
    with watch.span("push"):
        with watch.span("train"):
            clock[0] += 2.0
            first = watch.lap()
            clock[0] += 1.0
        clock[0] += 4.0
    second = watch.lap()
    assert (first["timing/hidden"], second["timing/hidden"]) == (2.0, 1.0)
    assert (first["timing/step"], second["timing/step"]) == (2.0, 5.0)
    assert (first["timing/push"], second["timing/push"]) == (2.0, 5.0)


def test_overlapping_spans_of_one_name_count_once_and_hide_nothing(clock):
    watch = Stopwatch()
    with watch.span("generate"), watch.span("generate"):
        clock[0] += 7.0
    assert watch.lap() == {"timing/generate": 7.0, "timing/step": 7.0, "timing/hidden": 0.0}


def test_work_of_a_rank_belongs_to_the_step_in_which_it_began(clock):
    events = []
    watch = Stopwatch(Events(events.append))
    begin = watch._epoch + clock[0]
    watch.step = 4
    watch.lap()  # the run begins
    clock[0] += 2.0
    watch.lap()
    watch.step = 5
    watch.worked("generator-0[1]", "generate", begin + 1.0, begin + 1.5)
    watch.worked("generator-0[1]", "generate", begin + 1.5, begin + 2.5)
    watch.worked("trainer[0]", "forward", begin + 2.25, begin + 2.5)
    watch.worked("trainer[0]", "excuse", begin + 2.25, begin + 2.25 + 1e-5)  # too short
    found = [(each["process"], each["name"], each["step"]) for each in events]
    assert found == [
        ("generator-0[1]", "generate", 4),
        ("generator-0[1]", "generate", 4),
        ("trainer[0]", "forward", 5),
    ]
    assert events[0]["end"] - events[0]["begin"] == pytest.approx(0.5, abs=1e-5)
    assert watch.lap() == {"timing/step": 0.0, "timing/hidden": 0.0}


def python_calls_of_a_span(generators: int) -> int:
    """Return the number of calls that a span makes while each of ``generators`` has one."""
    watch = Stopwatch()
    open_spans = [watch.span("pull", f"generator-{number}") for number in range(generators)]
    for each in open_spans:
        each.__enter__()
    calls = Counter()
    gc.disable()  # a collection calls hypothesis
    sys.setprofile(lambda frame, event, arg: calls.update([event]))
    with watch.span("check"):
        pass
    sys.setprofile(None)
    gc.enable()
    for each in open_spans:
        each.__exit__(None, None, None)
    return calls["call"]


def test_the_cost_of_a_span_does_not_depend_on_the_number_of_processes(monkeypatch):
    monkeypatch.setattr(spans, "SHORTEST_S", math.inf)  # a span that is slow emits an event
    assert python_calls_of_a_span(500) == python_calls_of_a_span(2) > 0
