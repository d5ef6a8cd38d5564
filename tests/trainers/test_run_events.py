"""Events that a run writes."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl.observe.record import rows_of
from tests.trainers.loops import generator_lost_once, lost_once


def events_of(run, *kinds):
    events = [row for row, _ in rows_of(run.record.events_path)]
    return [event for event in events if event["kind"] in kinds or not kinds]


def test_events_say_what_every_process_did_in_a_step(run, monkeypatch):
    monkeypatch.setattr("rl.observe.spans.SHORTEST_S", 0.0)
    run(steps=2)
    spans = events_of(run, "span")
    did = {(span["process"], span["name"]) for span in spans if span["step"] == 2}
    assert {
        ("controller", "train"),
        ("trainer", "forward_backward"),
        ("trainer", "optim_step"),
        ("generator-0", "generate"),
        ("reward", "score"),
    } <= did
    assert all(span["begin"] <= span["end"] for span in spans)


def test_events_have_the_start_every_row_of_metrics_in_order_and_the_summary(run):
    """A resumed run appends, and repeats the steps after its checkpoint."""
    _, rows = run(steps=3, save_every=2)
    events = events_of(run)
    assert [event["metrics"] for event in events_of(run, "metrics")] == rows
    assert [event["step"] for event in events_of(run, "checkpoint")] == [2, 3]
    assert [event["step"] for event in events_of(run, "started")] == [0]
    assert len(events_of(run, "pushed")) >= 3
    assert events[-1]["kind"] == "ended"
    assert events[-1]["summary"]["steps"] == 3
    run(steps=4, save_every=2, saved={2: run.saved[2]})
    assert [event["step"] for event in events_of(run, "started")] == [0, 2]
    assert [event["step"] for event in events_of(run, "metrics")] == [1, 2, 3, 3, 4]


def test_a_lost_generator_is_an_event_of_its_process(run):
    run(generator_lost_once, steps=8, staleness=1, replicas=2)
    changes = [(event["kind"], event["process"]) for event in events_of(run, "lost", "joined")]
    assert changes == [("lost", "generator-0"), ("joined", "generator-0")]


def test_a_lost_trainer_is_an_event_before_the_run_starts_again(run):
    run(lost_once(3), save_every=2)
    changes = events_of(run, "lost", "started")
    assert [event.get("process", event.get("step")) for event in changes] == [0, "trainer", 2]


def test_a_run_writes_its_metrics_to_its_sinks(run):
    run(steps=3, fields={"sinks.tensorboard": True})
    run.loop.run.folder.release()
    events = EventAccumulator(str(run.record.folder / "tensorboard"))
    events.Reload()
    assert [each.step for each in events.Scalars("reward/mean")] == [1, 2, 3]
