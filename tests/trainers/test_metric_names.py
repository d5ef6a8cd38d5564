"""Metrics and their table in the documentation agree."""

from pathlib import Path

import pytest
import torch

from rl.algorithms.advantages import GAE
from rl.algorithms.corrections import StalenessDecay
from rl.algorithms.losses import ClippedLoss, DecoupledLoss, DistillationLoss, ValueLoss
from rl.algorithms.tokens import Tokens
from tests.kit.fakes import Critic, Reference
from tests.kit.pages import documented, undocumented

SOURCES = [path.read_text() for path in (Path(__file__).parents[2] / "rl").rglob("*.py")]
COMPOSED = {
    f"{part}_{rule}"
    for part in ("generator/running", "generator/queue", "generator/cache")
    for rule in ("mean", "max")
} | {"advantage/mean", "advantage/std", "advantage/max"}
"""Names that the code puts together."""


def test_every_metric_of_a_run_with_all_parts_is_documented(run):
    fields = {
        "algorithm.loss": ClippedLoss.Config(kl_coef=0.1),
        "algorithm.advantage": GAE.Config(),
        "algorithm.corrections": (StalenessDecay.Config(),),
        "hardware.tflops": 1.0,
    }
    models = {"reference": Reference([]), "critic": Critic([], {})}
    _, rows = run(steps=3, staleness=1, fields=fields, models=lambda log: models)
    names = {name for row in rows for name in row}
    assert not undocumented(names)
    assert names >= {"kl/coef", "advantage/std", "critic/value/mean", "generator/running_max"}
    assert rows[0]["mfu"] == pytest.approx(3.0 / rows[0]["timing/step"])


def test_every_metric_of_the_losses_is_documented():
    names = ("logprobs", "entropy", "advantages", "values", "returns", "old_values", "staleness")
    policies = ("behaviour", "proximal", "reference", "teacher")
    columns = [*names, *(f"{policy}_logprobs" for policy in policies)]
    tokens = Tokens(dict.fromkeys(columns, torch.zeros(3)), sequence=torch.zeros(3).long())
    found = set()
    for loss in (DecoupledLoss.Config(), DistillationLoss.Config(), ValueLoss.Config()):
        found |= loss.build()(tokens)[1].keys()
    assert len(found) > 10
    assert not undocumented(found)


def test_every_documented_metric_exists():
    literals = [name for name in documented() if not any(map(str.isupper, name))]
    assert len(literals) > 50
    missing = [
        name
        for name in literals
        if name not in COMPOSED and not any(f'"{name}"' in source for source in SOURCES)
    ]
    assert not missing
