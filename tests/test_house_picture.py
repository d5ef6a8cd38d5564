"""docs/house.svg shows the rooms that exist."""

import re

from tests.kit.scripts import module

SCRIPT = "scripts/make_house_picture.py"


def test_the_picture_of_the_house_names_every_room(monkeypatch):
    script = module(SCRIPT, monkeypatch)
    drawn, now = (
        re.findall(r'class="name"[^>]*>([^<]+)</text>', text)
        for text in (script.PICTURE.read_text(), script.picture())
    )
    assert drawn == now, f"run {SCRIPT}: docs/house.svg is out of date"
    assert sorted(f"rl.{name}" for name in now) == script.rooms()
