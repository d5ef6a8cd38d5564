"""The page that Prometheus reads."""

import asyncio
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rl.cli.arguments import find_config
from rl.errors import ConfigError
from rl.host.listening import listen
from rl.session import pool
from rl.validation import validate


def samples(url: str) -> dict[tuple[str, ...], float]:
    """Return the values of a page by name and labels."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        text = answer.read().decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_run_serves_its_newest_metrics_and_the_figures_of_its_generators(run, monkeypatch):
    monkeypatch.setattr(pool, "FIGURES_S", 0.05)
    notes, pages = [], []

    async def read(_request: str) -> None:
        url = next(note for note in notes if "Prometheus" in note).split()[-1]
        pages.append(await asyncio.to_thread(samples, url))

    async def hang() -> None:
        await asyncio.Event().wait()

    def prepare(_trainer, first, second):
        first.during = read
        second.figures = hang

    fields = {"sinks.prometheus": "127.0.0.1:0"}
    trainer = run.make(prepare, steps=2, replicas=2, fields=fields)
    trainer.run.events.subscribe(lambda event: notes.append(event.get("text", "")))
    asyncio.run(run._train(close=True))
    first, last = pages[0], pages[-1]
    assert first["tiller_info", "run"] == 1
    assert not [name for name, *_ in first if name.startswith("tiller_reward")]
    row = run.record.read_metrics()[0]
    plain = {label: value for (_, *labels), value in last.items() for label in labels}
    assert {name: plain[name] for name in row} == pytest.approx(row, nan_ok=True)
    assert last["tiller_reward_mean", "reward/mean"] == row["reward/mean"]
    assert last["tiller_events_total", "metrics"] == 1
    engines = {name: value for name, value in last.items() if name[0].startswith("tiller_engine")}
    assert engines["tiller_engine_running", "generator-0"] > 0
    assert engines["tiller_engine_preemptions_total", "generator-0"] == 0
    assert {process for _, process in engines} == {"generator-0"}
    assert last["process_resident_memory_bytes",] > 1e6
    with pytest.raises(urllib.error.URLError, match="refused"):
        samples(next(note for note in notes if "Prometheus" in note).split()[-1])


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("9400", "sinks.prometheus is '9400'; it must be HOST:PORT, such as"),
        ("localhost:x", "sinks.prometheus is 'localhost:x'; it must be HOST:PORT"),
        ("0.0.0.0:9400", "sinks.prometheus 0.0.0.0: other machines can reach it; set TILLER_API"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_before_anything_starts(address, message):
    config = find_config("quickstart")()
    config.sinks.prometheus = address
    with pytest.raises(ConfigError, match=message):
        validate(config)


def test_a_port_that_is_taken_is_named_by_its_field(run):
    with listen("127.0.0.1", 0) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"sinks.prometheus {address}: .*in use"):
            run(steps=1, fields={"sinks.prometheus": address})
