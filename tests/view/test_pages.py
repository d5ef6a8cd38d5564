"""Every page in a browser."""

import threading
from functools import partial

import pytest
import uvicorn

from rl.host.listening import listen, url_of
from rl.view.export import export
from rl.view.run import Run
from rl.view.server import make_app
from tests.view.browser import browsing
from tests.view.runs import HOSTILE, line, make_run, metrics_of

FAILURE = {
    "error": f"out of memory {HOSTILE}",
    "place": "train.py, line 3",
    "actor": "trainer",
    "rank": 1,
    "command": "python -m rl.train --resume",
    "advice": [f"Lower {HOSTILE}", "Start again with: python -m rl.train --resume"],
    "detail": "all of it",
    "traceback": HOSTILE,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    hostile = partial(make_run, text=HOSTILE, turns=3)
    long = make_run(root / "long", steps=10_000, metrics=2, text="y" * 10_000_000, rollouts=4)
    return [make_run(root / "plain", layers=70), hostile(root / "failed", failure=FAILURE), long]


@pytest.fixture(scope="module")
def url(folders):
    app = make_app([Run(folder) for folder in folders])
    config = uvicorn.Config(app, log_level="error", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield url_of(listener)
        server.should_exit = True
        thread.join(30)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def page(browser, url):
    """Give the browser with the first page open; afterwards nothing may have gone wrong."""
    browser.errors.clear()
    browser.requests.clear()
    browser.open(f"{url}/")
    yield browser
    assert browser.errors == []
    elsewhere = [each for each in browser.requests if not each.startswith((url, "about:", "data:"))]
    assert elsewhere == []
    assert browser.value("document.title").endswith("Tiller")
    assert browser.value("document.querySelectorAll('main script, main img').length") == 0


def text(page, selector="main"):
    return page.value(f"document.querySelector({selector!r}).innerText")


def count(page, selector):
    return page.value(f"document.querySelectorAll({selector!r}).length")


def test_the_overview_compares_the_curves_of_all_runs(page):
    assert text(page, "#status") == "done"
    assert "20 / 20" in text(page, ".tiles")
    assert count(page, ".chart") == 3
    assert count(page, ".chart path.curve") == 9
    assert text(page, ".chart .head span").startswith("reward/mean")
    page.value("document.querySelectorAll('.legend')[1].click()")
    page.wait("location.hash.includes('hide=1')")
    page.wait("document.querySelectorAll('.chart path.curve').length === 6")


def test_labels_of_ticks_are_whole_and_differ(page):
    page.turn("#/overview?run=0")
    cases = [
        [-1.5e-5, -1.499e-5],
        [0.99995, 1.00005],
        [123456, 123462],
        [0.001, 0.0011],
        [0, 54321],
    ]
    for low, high in cases:
        curve = {"steps": [1, 10_000], "values": [low, high], "shade": 0}
        page.value(
            "import('/charts.js').then(({ chart }) => "
            f"main.replaceChildren(chart('one', [{curve}])))"
        )
        labels = page.value(
            "[...document.querySelectorAll('main text')].map((each) => each.textContent)"
        )
        assert len({*labels}) == len(labels) > 4
        clipped = page.value(
            "[...document.querySelectorAll('main text')].filter((each) => { const box = "
            "each.getBBox(); return box.x < 0 || box.x + box.width > 400; }).length"
        )
        assert clipped == 0, labels


def test_any_metric_is_found_by_its_name(page):
    page.turn("#/overview?run=0&filter=part1")
    assert count(page, ".chart") == 11  # part1 and part10 to part19
    page.turn("#/overview?run=0&filter=nothing")
    assert "no metric has this name" in text(page)


def test_the_timeline_has_the_spans_of_a_step(page):
    page.turn("#/timeline?run=0&step=7")
    assert count(page, "#spans rect") == 8
    assert "generator-0" in text(page, "main table")
    assert "75.0 %" in text(page, "main table")  # idle time of the generator
    page.press("j")
    page.wait("location.hash.includes('step=8')")
    page.turn("#/timeline?run=2&step=9000&count=5")
    assert count(page, "#spans rect") == 40


def test_a_profile_is_opened_from_the_timeline(page):
    page.turn("#/timeline?run=0&step=6")
    assert count(page, "#profiles") == 0
    page.turn("#/timeline?run=0&step=7")
    page.value("document.querySelector('#profiles a').click()")
    page.wait("document.querySelector('#flames') !== null")
    assert text(page, "main .bar b") == "trainer[0]"
    assert count(page, "#flames rect") == 10
    rows = page.value(
        "[...document.querySelectorAll('#operators tbody tr')].map((row) => "
        "[...row.cells].map((cell) => cell.innerText))"
    )
    assert rows == [
        ["Optimizer.step", "CPU", "1", "1.5 ms", "41.7 %", "3 ms"],
        ["aten::mm the answer", "CPU", "3", "1.2 ms", "33.3 %", "1.5 ms"],
        ["gemm", "GPU", "3", "600 µs", "16.7 %", "600 µs"],
        ["aten::resize_", "CPU", "3", "300 µs", "8.3 %", "300 µs"],
    ]
    assert "3" in text(page, ".chart .head")  # MiB
    page.value("document.querySelectorAll('#flames rect')[1].dispatchEvent(new Event('click'))")
    page.wait("document.querySelectorAll('#flames rect').length === 3")
    page.value("document.querySelector('main button').click()")
    page.wait("document.querySelectorAll('#flames rect').length === 10")
    links = page.value("[...document.querySelectorAll('a[download]')].map((each) => each.download)")
    assert links == ["step-7-trainer[0].json.gz", "trainer[0].pickle"]


def test_rollouts_are_filtered_sorted_and_opened(page):
    page.turn("#/rollouts?run=0&step=20")
    assert count(page, "tbody tr") == 8
    page.turn("#/rollouts?run=0&step=20&filter=reward%3E0%20stop%3Dstop&sort=-gap")
    assert count(page, "tbody tr") == 4
    assert text(page, "tbody td").strip() == "1·3"
    page.press("j")
    page.press("j")
    assert count(page, "tr.at") == 1
    page.press("Enter")
    page.wait("document.body.dataset.drawn.startsWith('rollout ')")
    assert page.value("location.hash").endswith("index=5")


def test_a_rollout_shows_its_turns_and_tokens(page):
    page.turn("#/rollout?run=1&step=20&index=1&colour=advantages")
    assert count(page, "#conversation .turn") == 6
    assert count(page, "#conversation .turn.sampled") == 3
    assert (count(page, ".tok"), count(page, ".tok.sampled")) == (21, 12)
    assert "<b>" in text(page, "#strip")
    assert count(page, ".tok.control") == count(page, "#conversation .control") == 1
    assert text(page, "#conversation .control") == "w6"
    assert "color-mix" in page.value("document.querySelector('.tok.sampled').style.background")
    page.value(
        "document.querySelectorAll('.tok.sampled')[1]"
        ".dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))"
    )
    assert "advantages\t-0.5" in text(page, "#token")


def test_a_gap_of_rounding_is_pale(page):
    page.turn("#/rollout?run=1&step=20&index=1&colour=gap")  # all gaps are 0.01
    assert text(page, "main .bar .dim:has(.scale)").split() == ["0", "0.1"]
    style = page.value("document.querySelector('.tok.sampled').style.background")
    assert "8%" in style


def test_groups_show_the_spread_of_rewards(page):
    page.turn("#/groups?run=0&step=20")
    assert count(page, "tbody tr") == 2
    assert count(page, "tbody circle") == 8
    page.turn("#/groups?run=0&step=20&only=flat")
    assert count(page, "tbody tr") == 0


def test_evaluations_have_curves_and_numbers(page):
    page.turn("#/evaluation?run=0")
    assert count(page, ".chart") == 1
    assert "eval/exact_match" in text(page, "main > .panel:last-child table")


def test_examples_that_changed_are_compared_worst_first(page):
    page.turn("#/evaluation?run=0")
    assert count(page, "#changed tbody tr") == 6  # greedy answers of the last two evaluations
    changes = [
        page.value(f"document.querySelectorAll('#changed tbody tr')[{row}].innerText")
        for row in (0, 5)
    ]
    assert "\t-1\t" in changes[0] and "evaluation 2 says" in changes[0]
    assert "\t+1\t" in changes[1] and "evaluation 3 says" in changes[1]
    page.turn("#/evaluation?run=0&before=5&after=20&examples=better%20task%3D%3Cb")
    assert count(page, "#changed tbody tr") == 1
    assert text(page, "#changed tbody").startswith("9·0\t<b>\t0\t1\t+1")
    page.turn("#/evaluation?run=0&kind=all")
    assert count(page, "#changed tbody tr") == 18
    page.turn("#/evaluation?run=0&examples=nothing")
    assert "no example fits the filter" in text(page)


def test_keys_go_through_examples_and_evaluations(page):
    page.turn("#/evaluation?run=0")
    page.press("/")
    assert page.value("document.activeElement.id") == "examples"
    page.value("document.activeElement.blur()")
    page.press("j")
    page.press("j")
    page.press("Enter")
    page.wait("document.getElementById('before') !== null")
    assert "example 2 of 6" in text(page)
    assert "After step 15" in text(page) and "After step 20" in text(page)
    page.press("j")
    page.wait("document.querySelector('main').innerText.includes('example 3 of 6')")
    page.press("[")
    page.wait("location.hash.includes('after=15') && document.getElementById('changed') !== null")
    assert "answer of step 10" in text(page, "#changed")


def test_an_example_shows_both_answers_and_their_numbers(page):
    page.turn("#/evaluation?run=1&before=15&after=20&example=0")
    for side in ("#before", "#after"):
        assert count(page, f"{side} .turn.sampled") == 1
    assert "correct\t0\t1" in text(page)
    page.turn("#/evaluation?run=1&before=15&after=20&example=999")
    assert "this example did not change" in text(page)


def test_a_run_with_one_evaluation_says_what_a_comparison_needs(page, folders):
    for step in range(1_005, 10_000, 1_000):
        (folders[2] / "evaluations" / f"step-{step}.parquet").unlink()
    page.turn("#/evaluation?run=2")
    assert "two evaluations with recorded rollouts are needed" in text(page)


def test_a_failure_shows_its_cause_as_text(page):
    page.turn("#/failure?run=1")
    assert text(page, "#status") == "failed"
    assert "<script>document.title='owned'</script>" in text(page, "#cause")
    assert "␀␛[31m⟨202e⟩" in text(page, "#cause")
    assert count(page, "#advice li") == 2
    assert "python -m rl.train --resume" in text(page, "#advice")
    assert "trainer-0.log" in text(page)
    page.turn("#/failure?run=0")
    assert "no failure is recorded" in text(page)


def test_configs_are_compared(page):
    page.turn("#/config?run=0&other=1")
    assert count(page, "tbody tr.differs") == 1
    assert "<script>" in text(page, "tr.differs")
    page.turn("#/config?run=0&other=1&all=1")
    assert count(page, "tbody tr") == 3


def test_routing_is_a_picture_by_layer_and_step(page):
    page.turn("#/experts?run=0")  # layers of two requests
    assert text(page, "#nav").split()[-1] == "experts"
    size = "[document.querySelector('.layers').width, document.querySelector('.layers').height]"
    assert page.value(size) == [20, 70]
    assert "layers 0 to 69 from the top, steps 1 to 20" in text(page)
    pixels = "document.querySelector('.layers').getContext('2d').getImageData(0, 0, 20, 70).data"
    cells = page.value(f"[...{pixels}].filter((_, place) => place % 4 === 3)")
    assert cells[:20] == sorted(cells[:20]) and cells[-1] == 255 > 2 * cells[19]
    page.value(
        "document.querySelector('.layers').dispatchEvent(new MouseEvent('mousemove', "
        "{clientX: 9999, clientY: 9999}))"
    )
    assert "layer 69, step 20: 89" in text(page)
    page.turn("#/experts?run=1")
    assert "no step of this run has numbers about experts" in text(page)
    page.turn("#/overview?run=1")
    assert "experts" not in text(page, "#nav")


def test_hostile_text_is_shown_as_text(page):
    page.turn("#/rollouts?run=1&step=20")
    assert "<script>" in text(page, "td.text + td.text")
    page.turn("#/rollout?run=1&step=20&index=0")
    assert "answer" in text(page)
    page.turn("#/overview?run=1")
    assert "onerror=alert(1)" in text(page)
    page.turn("#/evaluation?run=1")
    assert "<script>" in text(page, "#changed")
    page.turn("#/timeline?run=1&step=7&profile=trainer%5B0%5D.json.gz")
    assert "<script>" in text(page, "#operators")


def test_a_text_of_ten_megabytes_is_cut(page):
    page.turn("#/rollout?run=2&step=10000&index=0")
    assert "100,000 of 10,000,000 characters" in text(page)


def test_keys_open_pages_and_help(page):
    page.press("4")
    page.wait("document.body.dataset.drawn.startsWith('rollout ')")
    page.press("?")
    page.wait("document.getElementById('help').open")
    page.value("document.getElementById('help').close()")
    dark = page.value("document.documentElement.classList.contains('dark')")
    page.press("d")
    assert page.value("document.documentElement.classList.contains('dark')") is not dark
    page.press("3")
    page.wait("document.body.dataset.drawn.startsWith('rollouts ')")
    page.press("/")
    assert page.value("document.activeElement.id") == "filter"


def test_a_page_follows_its_run(page, folders):
    with open(folders[0] / "metrics.jsonl", "a") as file:
        file.write(line(metrics_of(21)))
    page.wait("document.querySelector('.tiles').innerText.includes('21 / 20')")


def test_the_exported_file_works_without_a_server(browser, folders, tmp_path):
    path = tmp_path / "runs.html"
    export([Run(folder) for folder in folders[:2]], path)
    browser.errors.clear()
    browser.requests.clear()
    browser.open(path.as_uri())
    assert "written by --export" in text(browser, "#notice")
    for name in ("timeline", "rollouts", "rollout", "groups", "evaluation", "failure", "config",
                 "experts"):  # fmt: skip
        browser.turn(f"#/{name}?run=1")
        assert "failed:" not in text(browser)
    browser.turn("#/rollout?run=1&step=20&index=1")
    assert count(browser, ".tok") == 21
    browser.turn("#/evaluation?run=1")
    assert count(browser, "#changed tbody tr") == 6
    browser.press("j")
    browser.press("Enter")
    browser.wait("document.querySelector('#after .turn.sampled') !== null")
    assert browser.errors == []
    assert {each.partition(":")[0] for each in browser.requests} <= {"file", "about", "data"}


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_no_page_is_wider_than_its_screen(page, url, width):
    with page.screen(width):
        for name in ("overview", "timeline", "rollouts", "rollout", "groups", "evaluation",
                     "failure", "config", "experts"):  # fmt: skip
            page.open(f"{url}/#/{name}?run=1")
            assert page.value("document.documentElement.scrollWidth") <= width, name
