"""Events that a run writes."""

import asyncio
from collections import Counter

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl.observe.record import rows_of


def events_of(run):
    return [row for row, _ in rows_of(run.record.events_path)]


def tensorboard_steps(folder, name):
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [each.step for each in events.Scalars(name)]


def kinds(events):
    return Counter(event["kind"] for event in events)


def test_events_have_every_row_of_metrics_in_order(run):
    _, rows = run(steps=4)
    events = [event for event in events_of(run) if event["kind"] == "metrics"]
    assert [event["step"] for event in events] == [1, 2, 3, 4]
    assert [event["metrics"] for event in events] == rows


def test_events_say_what_every_process_did_in_a_step(run, monkeypatch):
    monkeypatch.setattr("rl.observe.spans.SHORTEST_S", 0.0)
    run(steps=2)
    spans = [event for event in events_of(run) if event["kind"] == "span"]
    did = {(span["process"], span["name"]) for span in spans if span["step"] == 2}
    assert {
        ("controller", "train"),
        ("trainer", "forward_backward"),
        ("trainer", "optim_step"),
        ("generator-0", "generate"),
        ("reward", "score"),
    } <= did
    assert all(span["begin"] <= span["end"] for span in spans)


def test_events_begin_with_the_start_and_end_with_the_summary(run):
    run(steps=3, save_every=2)
    events = events_of(run)
    found = kinds(events)
    start = next(event for event in events if event["kind"] == "started")
    assert start["step"] == 0
    assert found["pushed"] >= 3
    assert [event["step"] for event in events if event["kind"] == "checkpoint"] == [2, 3]
    assert events[-1]["kind"] == "ended"
    assert events[-1]["summary"]["steps"] == 3


def test_a_resumed_run_appends_and_repeats_the_steps_after_its_checkpoint(run):
    run(steps=3, save_every=2)
    run(steps=4, save_every=2, saved=run.saved)
    events = events_of(run)
    starts = [event["step"] for event in events if event["kind"] == "started"]
    assert starts[0] == 0
    assert len(starts) == 2
    steps = [event["step"] for event in events if event["kind"] == "metrics"]
    assert steps == [1, 2, 3, *range(starts[1] + 1, 5)]


def test_a_lost_generator_is_an_event_of_its_process(run):
    def prepare(trainer, first, second):
        async def generate(request):
            if first.version == 2 and first.starts == 1:
                first.lose("generate")

        async def train():
            await asyncio.sleep(0.01)  # so that there is still work when it is back

        trainer.during["forward_backward"] = train
        first.during = generate

    run(prepare, steps=8, staleness=1, replicas=2)
    changes = [
        (event["kind"], event["process"])
        for event in events_of(run)
        if event["kind"] in ("lost", "joined")
    ]
    assert changes == [("lost", "generator-0"), ("joined", "generator-0")]


def test_a_lost_trainer_is_an_event_before_the_run_starts_again(run):
    def prepare(trainer, generator):
        async def train():
            if trainer.version == 3 and trainer.starts == 1:
                raise trainer.lose("forward_backward")

        trainer.during["forward_backward"] = train

    run(prepare, steps=4, save_every=2)
    changes = [
        event["process"] if event["kind"] == "lost" else event["step"]
        for event in events_of(run)
        if event["kind"] in ("lost", "started")
    ]
    assert changes == [0, "trainer", 2]


def test_a_run_writes_its_metrics_to_its_sinks(run):
    def edit(config):
        config.sinks.tensorboard = True

    run(steps=3, edit=edit)
    run.loop.run.folder.release()
    assert tensorboard_steps(run.record.folder, "reward/mean") == [1, 2, 3]
