import io
import math
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from rl.errors import end_program
from rl.observe.progress import Progress, duration, sparkline, summary_text, time_shares
from tests.kit.records import make_rows


def run(count, *, terminal=False, quiet=False, rows=None, **options):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, quiet=quiet, highlight=False)
    with Progress(count, quiet=quiet, console=console, **options) as progress:
        progress.stage("starting trainer on 4 ranks…")
        for row in rows or make_rows(count):
            progress.update(row)
        progress.warn("step 2: drift: kl/behaviour is 0.06")
        progress.evaluation(
            {"step": 2, "eval/prompts": 256.0, "eval/exact_match": 0.25, "eval/pass@4": math.nan}
        )
        progress.note("run folder: runs/x")
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())


def steps_shown(output):
    return [int(step) for step in re.findall(r"^step (\d+)/", output, flags=re.M)]


def test_without_a_terminal_first_last_and_every_tenth_step_print_a_line():
    assert steps_shown(run(100)) == [1, *range(10, 101, 10)]
    assert steps_shown(run(3)) == [1, 2, 3]


def test_without_a_terminal_slow_steps_print_a_line_each(monkeypatch):
    now = iter(range(0, 100_000, 61))
    monkeypatch.setattr("rl.observe.progress.time.monotonic", lambda: next(now))
    assert len(steps_shown(run(100))) == 100


def test_a_plain_line_has_reward_speed_and_shares_of_time():
    output = run(10)
    assert "starting trainer on 4 ranks…" in output
    assert "run folder: runs/x" in output
    line = next(line for line in output.splitlines() if line.startswith("step 5/10"))
    assert "reward 0.444 · correct 50% · 1,234 tok/s · generate 50% train 30%" in line
    assert "push" not in line
    assert re.search(r"(9|10)s left", line)


def test_a_terminal_shows_bar_sparkline_and_time_left():
    output = run(30, terminal=True)
    assert "starting trainer on 4 ranks…" in output
    assert "step 30/30" in output
    assert "━" * 40 in output
    assert "▁▁▂" in output
    assert "reward 1.000" in output
    assert "run folder: runs/x" in output


def test_a_finished_step_replaces_the_stage_and_a_narrow_terminal_gets_two_lines():
    out = io.StringIO()
    progress = Progress(30, quiet=False, console=Console(file=out, force_terminal=True, width=50))
    progress.stage("warming up…")
    progress.update(make_rows(30)[9])
    out.truncate(out.seek(0))
    progress.console.print(progress._render())
    assert "step" in out.getvalue() and "warming up…" not in out.getvalue()
    assert len(out.getvalue().splitlines()) == 2


def test_an_evaluation_names_its_weights_and_skipped_evaluations():
    out = io.StringIO()
    row = {"eval/exact_match": 0.25, "eval/version_max": 7, "eval/skipped": 0, "eval/lost": 0.0}
    progress = Progress(1, quiet=False, console=Console(file=out, width=120))
    progress.evaluation({"step": 7, "eval/version_min": 7, **row})
    progress.evaluation({"step": 4, "eval/version_min": 4, **row, "eval/skipped": 2})
    progress.evaluation({"step": 7, "eval/version_min": 7, **row, "eval/lost": 3.0})
    progress.evaluation({"step": 0, "eval/loss": 0.5, "eval/tokens": 90.0})
    first, second, third, start = out.getvalue().splitlines()
    assert first == "evaluated after step 7 · exact_match 0.250"
    assert second == (
        "evaluated after step 4 · exact_match 0.250 · by policy versions 4 to 7 · 2 due before it "
        "skipped"
    )
    assert third == "evaluated after step 7 · exact_match 0.250 · 3 rewards failed"
    assert start == "evaluated before the first step · loss 0.500"


SUMMARY = {
    "steps": 60,
    "steps_learned": 60,
    "policy_version": 60,
    "restarts": 2,
    "restarts/trainer": 0,
    "restarts/generators": 2,
    "dropped": {},
    "lost": {"reward raised": 3, "reward hung": 1},
    "policy_digest": "0a1b",
    "export": "runs/x/export",
    "eval/prompts": 256.0,
    "eval/pass@4": 0.0,
    "eval/reward_mean": 0.123456,
    "eval/exact_match": 0.0,
    "eval/lost": 0.0,
    "eval/version_min": 60,
    "eval/version_max": 60,
}
SHOWN = [
    "eval/exact_match 0 (0 at the start)",
    "eval/reward_mean 0.1235 (0.05 at the start)",
    "eval/pass@4 0",
    "eval/prompts 256",
    "steps 60",
    "restarts/generators 2",
    "lost 3 reward raised, 1 reward hung",
    "export runs/x/export",
]


def test_a_summary_begins_with_the_scores_and_leaves_out_zeros():
    start = {"step": 0, "eval/exact_match": 0.0, "eval/reward_mean": 0.05, "eval/prompts": 256.0}
    lines = summary_text(SUMMARY, start).splitlines()
    assert [" ".join(line.split()) for line in lines] == SHOWN
    of_examples = {"steps": 9, "examples_dropped": 0, "eval/perplexity": 2.0, "eval/loss": 0.7}
    names = [line.split()[0] for line in summary_text(of_examples).splitlines()]
    assert names == ["eval/loss", "eval/perplexity", "steps"]


def test_a_warning_stands_out():
    out = io.StringIO()
    Progress(
        1, quiet=False, console=Console(file=out, force_terminal=True, color_system="standard")
    ).warn("[drift]")
    assert out.getvalue() == "\x1b[33mwarning: [drift]\x1b[0m\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_quiet_run_shows_nothing_others_their_warnings(terminal):
    bare = [{"step": 1}, {"step": 2, "reward/mean": math.nan}]
    for count, rows in ((30, make_rows(30)[20:]), (2, bare)):  # resumed; few metrics, no numbers
        lines = [*map(str.strip, run(count, terminal=terminal, rows=rows).splitlines())]
        assert any(f"step {count}/{count}" in line for line in lines)
        assert "warning: step 2: drift: kl/behaviour is 0.06" in lines
        assert "evaluated after step 2 · exact_match 0.250 · pass@4 nan" in lines
    assert run(10, terminal=terminal, quiet=True) == ""


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("quiet", [False, True])
def test_the_log_has_all_plain_lines_with_the_time(terminal, quiet, tmp_path):
    log = tmp_path / "run.log"
    run(20, terminal=terminal, quiet=quiet, log=log)
    lines = log.read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", line) for line in lines)
    said = [line[21:] for line in lines]
    assert said[0] == "starting trainer on 4 ranks…"
    assert steps_shown("\n".join(said)) == [1, *range(2, 21, 2)]
    assert said[-3] == "warning: step 2: drift: kl/behaviour is 0.06"
    assert "\x1b" not in log.read_text()


def test_a_log_that_cannot_be_written_is_ignored(tmp_path):
    for log in (tmp_path, tmp_path / "no" / "run.log", Path("/dev/full")):
        assert "run folder: runs/x" in run(2, log=log)


def test_the_cursor_is_restored_when_the_program_ends_at_once():
    screen, terminal = os.openpty()
    child = os.fork()
    if child == 0:
        try:
            with (
                open(terminal, "w") as file,
                Progress(3, quiet=False, console=Console(file=file, force_terminal=True)),
            ):
                end_program(130)
        finally:
            os._exit(99)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
    shown = os.read(screen, 100_000)
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")


def test_sparkline_spans_least_to_greatest():
    assert sparkline([0.0, 0.5, 1.0], 8) == "▁▅█"
    assert sparkline([3.0, 3.0], 8) == "▁▁"
    assert sparkline([], 8) == ""
    assert len(sparkline([float(value) for value in range(1000)], 24)) == 24


def test_shares_of_time_name_evaluation_and_add_up_to_at_most_the_whole():
    in_turns = {"timing/generate": 3.0, "timing/train": 1.0, "timing/evaluate": 6.0}
    assert time_shares({"timing/step": 12.0} | in_turns) == "generate 25% train 8% evaluate 50%"
    overlapping = {"timing/generate": 9.0, "timing/score": 6.0, "timing/train": 5.0}
    assert time_shares({"timing/step": 10.0} | overlapping) == "generate 45% score 30% train 25%"


def test_shares_and_durations_are_short():
    assert time_shares(make_rows(1)[0]) == "generate 50% train 30%"
    assert time_shares({"step": 1}) == ""
    shown = [duration(seconds) for seconds in (0.4, 59, 188, 7500, 273_600)]
    assert shown == ["0s", "59s", "3m 08s", "2h 05m", "3d 04h"]
