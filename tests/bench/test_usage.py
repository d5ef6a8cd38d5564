"""Every benchmark has a command line that describes it and that can print JSON."""

import pytest

from tests.bench.programs import ROOT, module


def test_every_benchmark_describes_itself_and_prints_json(monkeypatch, capsys):
    scripts = [
        path for path in (ROOT / "scripts/bench").glob("*.py") if "--json" in path.read_text()
    ]
    assert len(scripts) > 10
    for path in scripts:
        bench = module(f"scripts/bench/{path.name}", monkeypatch)
        monkeypatch.setattr("sys.argv", [path.name, "--help"])
        with pytest.raises(SystemExit) as end:
            bench.main()
        assert end.value.code == 0, path.name
        assert "--json" in capsys.readouterr().out, path.name
