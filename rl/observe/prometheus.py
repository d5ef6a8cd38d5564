"""Numbers of a run or a server for Prometheus."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from rl.observe.events import Event

NOW = ("running", "queue", "cache", "policy_version")
"""Figures of an engine that rise and fall; all others only rise."""


class Numbers(Collector):
    """Numbers that Prometheus reads: those of the newest step and evaluation, counts of events, and
    figures of engines. ::

        numbers = Numbers("first")
        events.subscribe(numbers.write)
        numbers.engines = await session.pool.figures()
        answer = generate_latest(numbers.registry)

    - The metric ``reward/mean`` is ``tiller_reward_mean{name="reward/mean"}``.
    - The figure ``running`` of a generator is ``tiller_engine_running{process="generator-0"}``.
    """

    def __init__(self, name: str):
        """``name`` of the run or the model is a label of ``tiller_info``."""
        self.engines: Mapping[str, Mapping[str, float]] = {}
        """Figures of each generator, by its name."""
        self.registry = CollectorRegistry()
        self._name = name
        self._rows: dict[str, dict[str, Any]] = {}
        self._times: dict[str, float] = {}
        self._counts: Counter[str] = Counter()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def write(self, event: Event) -> None:
        """Take an event: see :class:`rl.observe.events.Events`."""
        kind = event["kind"]
        self._counts[kind] += 1
        self._times[kind] = event["time"]
        if kind in ("metrics", "evaluation"):
            self._rows[kind] = event["metrics"]

    def collect(self) -> Iterator[Metric]:
        """Yield all numbers, those of one name together."""
        yield _family(GaugeMetricFamily, "info", "name", {self._name: 1})
        yield _family(CounterMetricFamily, "events", "kind", self._counts.copy())
        yield _family(GaugeMetricFamily, "event_time_seconds", "kind", self._times.copy())
        metrics: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for row in [*self._rows.values()]:
            for name, value in row.items():
                if isinstance(value, int | float):
                    metrics[re.sub(r"[^a-zA-Z0-9_]", "_", name)][name] = value
        for plain, values in metrics.items():
            yield _family(GaugeMetricFamily, plain, "name", values)
        engines = self.engines
        for name in next(iter(engines.values()), ()):
            kind = GaugeMetricFamily if name in NOW else CounterMetricFamily
            values = {process: figures[name] for process, figures in engines.items()}
            yield _family(kind, f"engine_{name}", "process", values)


def _family(kind: Any, name: str, label: str, values: Mapping[str, float]) -> Metric:
    family = kind(f"tiller_{name}", name, labels=[label])
    for label_value, value in values.items():
        family.add_metric([label_value], value)
    return family
