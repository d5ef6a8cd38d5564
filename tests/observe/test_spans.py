import pytest

from rl.observe.spans import Stopwatch


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("rl.observe.spans.time.perf_counter", lambda: now[0])
    return now


def test_spans_of_one_name_add_up_and_a_lap_covers_the_step(clock):
    watch = Stopwatch()
    for _ in range(2):
        with watch.span("generate"):
            clock[0] += 2.0
    with watch.span("train"):
        clock[0] += 1.0
    clock[0] += 0.5
    assert watch.lap() == {"timing/generate": 4.0, "timing/train": 1.0, "timing/step": 5.5}


def test_a_lap_starts_the_next_from_nothing(clock):
    watch = Stopwatch()
    with watch.span("generate"):
        clock[0] += 2.0
    watch.lap()
    clock[0] += 3.0
    assert watch.lap() == {"timing/step": 3.0}


def test_a_span_that_raises_counts(clock):
    watch = Stopwatch()
    with pytest.raises(RuntimeError), watch.span("train"):
        clock[0] += 1.0
        raise RuntimeError
    assert watch.lap()["timing/train"] == 1.0
