"""Pages over HTTP, the program and the exported file."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from starlette.testclient import TestClient

from rl.view.__main__ import main
from rl.view.export import export
from rl.view.run import Run
from rl.view.server import PAGE, make_app
from tests.view.runs import HOSTILE, make_run

BASE = "http://127.0.0.1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("view") / "run", turns=2, text=HOSTILE)


@pytest.fixture(scope="module")
def runs(folder):
    return [Run(folder), Run(folder)]


@pytest.fixture
def client(runs):
    return TestClient(make_app(runs), base_url=BASE, follow_redirects=False)


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("runs", "runs"),
        ("state?run=1", "last"),
        ("curves?names=reward/mean,loss/mean", "curves"),
        ("timeline?step=3", "spans"),
        ("table?step=20", "rows"),
        ("rollout?step=20&index=1", "sequences"),
        ("evaluations", "curves"),
        ("changes?before=5&after=10", "rows"),
        ("example?step=10&index=1", "sequences"),
        ("failure", "logs"),
        ("config", "fields"),
    ],
)
def test_every_answer_is_json(client, path, key):
    answer = client.get(f"/api/{path}")
    assert answer.status_code == 200
    assert key in answer.json()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/nothing", 404),
        ("/api/state?run=2", 404),
        ("/api/state?run=-1", 404),
        ("/api/state?run=x", 400),
        ("/nothing.js", 404),
        ("/..%2f__main__.py", 404),
        ("/api/table?step=999", 200),
        ("/profiles/0/7/trainer%5B0%5D.json.gz", 200),
        ("/profiles/0/7/trainer%5B0%5D.pickle", 200),
        ("/profiles/0/7/trainer%5B1%5D.pickle", 404),
        ("/profiles/2/7/trainer%5B0%5D.pickle", 404),
        ("/profiles/0/7/..", 404),
        ("/profiles/0/7/..%2f..%2f..%2fconfig.json", 404),
    ],
)
def test_wrong_addresses_are_answered(client, path, status):
    assert client.get(path).status_code == status


def test_every_answer_forbids_scripts_of_others(client):
    for path in ("/", "/app.js", "/style.css", "/api/runs", "/api/nothing"):
        policy = client.get(path).headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'" in policy
        assert "unsafe" not in policy


def test_the_page_is_small_and_names_no_other_host(client):
    names = [path.name for path in PAGE.iterdir()]
    texts = [client.get(f"/{name}").text for name in names]
    used = re.findall(r'(?:src|href)="/([a-z.]+)"|from "\./([a-z]+\.js)"', "".join(texts))
    assert {name for pair in used for name in pair if name} | {"index.html"} == {*names}
    assert sum(map(len, texts)) < 500_000
    text = "".join(texts).replace("http://www.w3.org/2000/svg", "")
    assert "http:" not in text and "https:" not in text and "innerHTML" not in text


def test_other_hosts_names_are_refused_without_a_key(runs):
    client = TestClient(make_app(runs), base_url="http://evil.example")
    assert client.get("/api/runs").status_code == 403
    assert client.get("/").status_code == 403


def test_a_key_is_asked_for_and_kept(runs):
    client = TestClient(make_app(runs, "secret"), base_url="http://far", follow_redirects=False)
    assert client.get("/api/runs").status_code == 401
    assert client.get("/app.js").status_code == 401
    form = client.get("/")
    assert "width=device-width" in form.text
    assert (form.status_code, 'type="password"' in form.text) == (401, True)
    assert "This key is wrong" not in form.text
    refused = client.post("/key", content="key=wrong")
    assert refused.status_code == 401
    assert "This key is wrong" in refused.text and 'type="password"' in refused.text
    assert client.get("/api/runs").status_code == 401
    assert client.post("/key", content="x" * 5_000).status_code == 413
    assert client.post("/key", content="key=secret").status_code == 303
    assert client.get("/api/runs").status_code == 200
    assert "secret" not in client.cookies.values()
    odd = TestClient(make_app(runs, "schlüssel; 鍵"), base_url="http://far", follow_redirects=False)
    odd.post("/key", content="key=schl%C3%BCssel%3B+%E9%8D%B5")
    assert odd.get("/api/runs").status_code == 200
    bare = TestClient(make_app(runs, "secret"), base_url="http://far")
    assert "send the key as Authorization" in bare.get("/api/runs").text
    wrong = {"authorization": "Bearer wrong"}
    for path in ("/", "/api/runs"):
        assert "TILLER_API_KEY that the server" in bare.get(path, headers=wrong).text
    given = {"authorization": "Bearer secret"}
    assert bare.get("/api/runs", headers=given).status_code == 200


def test_lone_surrogates_and_control_characters_are_sent(tmp_path):
    folder = make_run(tmp_path / "run", recorded=0)
    (folder / "failure.json").write_text('{"error": "\\ud800 \\u0000 </script>"}')
    client = TestClient(make_app([Run(folder)]), base_url=BASE)
    text = client.get("/api/failure").text
    assert json.loads(text)["failure"]["error"] == "\ud800 \x00 </script>"


LONG = ["9" * 20, "9" * 300, "9" * 5000, "-1", "x", "%C3%A9", "%00"]


@pytest.mark.parametrize("number", LONG, ids=lambda each: each[:9])
def test_a_number_that_no_step_has_is_refused(runs, number):
    client = TestClient(make_app(runs), base_url=BASE, raise_server_exceptions=False)
    paths = [f"/profiles/{number}/1/x", f"/profiles/0/{number}/x", f"/profiles/0/1/{number}"]
    paths += [f"/api/table?step={number}", f"/api/state?run={number}", f"/{number}"]
    paths += [f"/api/rollout?step=1&index={number}", f"/api/timeline?step=1&count={number}"]
    for path in paths:
        assert client.get(path).status_code in (200, 400, 404), path


@pytest.mark.parametrize("key", ["schlüssel", "\udcff"])
def test_any_key_is_accepted_in_its_bytes(runs, key):
    client = TestClient(make_app(runs, key), base_url="http://far", raise_server_exceptions=False)
    for given, status in ((os.fsencode(key), 200), (b"\xe9", 401)):
        sent = {b"authorization": b"Bearer " + given}
        found = client.get("/api/runs", headers=sent).status_code
        assert found == status or key == "\udcff"
        assert found < 500


def exported(runs, folder) -> tuple[str, dict]:
    """Return the page that is written of ``runs``, and its data."""
    export(runs, folder / "run.html")
    page = (folder / "run.html").read_text()
    return page, json.loads(re.search(r'id="exported">(.*)</script>', page)[1])


def test_the_exported_file_has_its_data_and_no_markup_of_a_rollout(runs, tmp_path):
    page, data = exported(runs, tmp_path)
    assert page.count("<script") == page.count("</script>") == 2
    assert 'src="' not in page and '<link rel="stylesheet' not in page
    assert len(data["table 0 20"]["rows"]) == 8
    assert data["rollout 1 20 7"]["sequences"]
    row = data["changes 1 15 20"]["rows"][0]
    assert data[f"example 1 15 {row['index_before']}"]["sequences"]
    assert data[f"example 1 20 {row['index_after']}"]["sequences"]
    assert data["runs"]["exported"][0] == (
        "run: rollouts and timelines of steps 1 to 20, 64 rollouts each; examples of the "
        "evaluations 15 and 20"
    )


def test_the_exported_file_is_bounded_and_says_what_it_lacks(runs, tmp_path, monkeypatch):
    monkeypatch.setattr("rl.view.export.MAX_BYTES", 20_000)
    _, data = exported(runs[:1], tmp_path)
    assert "table 0 20" in data
    assert "table 0 18" not in data
    assert data["state 0"]["evaluation_steps"] == []
    assert re.search(r"steps (19|20) to 20", data["runs"]["exported"][0])


def test_examples_take_a_quarter_of_the_exported_file_at_most(runs, tmp_path, monkeypatch):
    monkeypatch.setattr("rl.view.export.MAX_BYTES", 80_000)
    _, data = exported(runs[:1], tmp_path)
    parts = {name: data[name] for name in data if name.startswith(("changes", "example"))}
    assert 0 < len([name for name in parts if name.startswith("example")]) < 30
    assert len(json.dumps(parts, separators=(",", ":"))) <= 20_000


def test_the_program_serves_and_ends_on_a_signal(folder):
    command = [sys.executable, "-m", "rl.view", str(folder), "--port", "0"]
    environment = {name: os.environ[name] for name in os.environ if name != "TILLER_API_KEY"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        url = process.stdout.readline().strip()
        with urllib.request.urlopen(f"{url}api/state", timeout=120) as answer:
            assert json.load(answer)["step"] == 20
        process.send_signal(signal.SIGINT)
        assert process.wait(120) in (130, -signal.SIGINT)
    finally:
        process.kill()
        process.wait()


def test_the_program_exports(folder, tmp_path, capsys):
    assert main([str(folder), "--export", str(tmp_path / "run.html")]) == 0
    assert re.fullmatch(r".*run\.html: \d+\.\d MB\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--port", "0"], "name the folder of a run"),
        (["/nowhere"], "/nowhere is not a folder"),
        (["{tmp}"], "holds no run"),
        (["{run}", "--port", "70000"], "--port 70000: it must be 0 to 65535"),
        (["{run}", "--port", "x"], "invalid int value"),
        (["{run}", "--host", "0.0.0.0"], "other machines can reach it; set TILLER_API_KEY"),
        (["{run}", "--export", "/nowhere/run.html"], "--export /nowhere/run.html"),
        (["{run}", "--port", "{taken}"], "in use"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TILLER_API_KEY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"run": folder, "tmp": tmp_path, "taken": taken.getsockname()[1]}
        assert main([each.format(**names) for each in arguments]) == 2
    assert error in capsys.readouterr().err


def test_help_is_printed(capsys):
    assert main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: python -m rl.view RUN")
