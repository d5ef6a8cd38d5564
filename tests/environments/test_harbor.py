"""Tasks of Harbor are environments; a container that fails gives no reward.

A program in the place of ``docker`` runs the commands in folders of this host.
"""

import os
import stat
import sys
from pathlib import Path

import pytest

from rl.environments.harbor import HarborTask
from rl.errors import ConfigError, InfrastructureError

DOCKER = """#!{python}
import json, os, shutil, subprocess, sys
home = {home!r}
with open(os.path.join(home, "log"), "a") as log:
    print(json.dumps(sys.argv[1:]), file=log)
verb, *rest = sys.argv[1:]
broken = os.path.join(home, "broken")
if os.path.exists(broken) and open(broken).read() in ("all", verb):
    sys.exit("Cannot connect to the Docker daemon")
if verb == "build":
    print("sha256:1")
elif verb == "run":
    os.makedirs(os.path.join(home, "containers", rest[rest.index("--name") + 1]))
elif verb == "inspect":
    print(str(os.path.exists(os.path.join(home, "containers", rest[-1]))).lower())
elif verb == "rm":
    shutil.rmtree(os.path.join(home, "containers", rest[-1]))
elif verb == "cp":
    name, _, path = rest[1].partition(":")
    target = os.path.join(home, "containers", name) + path
    shutil.copytree(rest[0], target)
    script = os.path.join(target, "test.sh")
    text = open(script).read().replace("/logs", os.path.join(home, "containers", name, "logs"))
    open(script, "w").write(text)
elif verb == "exec":
    root = os.path.join(home, "containers", rest[0])
    if not os.path.exists(root):
        sys.exit("Error response from daemon: No such container")
    words = [word.replace("/logs", root + "/logs").replace("/tests", root + "/tests")
             for word in rest[1:]]
    sys.exit(subprocess.run(words, cwd=root).returncode)
"""


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """Folder of the engine, with ``log`` and ``containers``. What ``broken`` names fails."""
    home = tmp_path / "engine"
    home.mkdir()
    program = home / "docker"
    program.write_text(DOCKER.format(python=sys.executable, home=str(home)))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{home}:{os.environ['PATH']}")
    return home


TEST = "test -f done.txt && r=$(cat done.txt) || r=0\necho $r > /logs/verifier/reward.txt\n"


def write_task(folder: Path, text: str, toml: str = "", test: str = TEST) -> None:
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text(f'version = "1.0"\n{toml}')
    (folder / "instruction.md").write_text(text)
    (folder / "tests" / "test.sh").write_text(test)


@pytest.fixture
def make(model, tmp_path, home):
    """Function that returns the task of the folder ``tasks``; fields are those of the config."""

    def make(**fields):
        path = str(tmp_path / "tasks")
        return HarborTask.Config(**{"path": path, "held_out_fraction": 0.0} | fields).build(
            seed=0, model=model
        )

    return make


@pytest.fixture
def opened(make, tmp_path):
    """Function that returns the environment of one task after its begin."""

    def opened(toml="", test=TEST, **fields):
        write_task(tmp_path / "tasks" / "one", "Write 1 into done.txt.", toml, test)
        environment = make(**fields).environment(make(**fields).prompt(0), 0)
        opening = environment.reset()
        assert opening.messages == [{"role": "user", "content": "Write 1 into done.txt."}]
        assert [tool["function"]["name"] for tool in opening.tools] == ["bash"]
        return environment

    return opened


def called(environment, command: str) -> str:
    call = {"function": {"name": "bash", "arguments": {"command": command}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    (answer,) = environment.step(message).messages
    return answer["content"]


DONE = {"role": "assistant", "content": "done"}


def test_an_episode_is_commands_in_a_container_and_the_reward_of_its_tests(opened, home):
    environment = opened(engine="docker")
    assert called(environment, "echo 1 > done.txt; echo ok; echo no >&2; false") == (
        "ok\nno\n(exit code 1)"
    )
    assert called(environment, "true") == "(no output)"
    reply = environment.step(DONE)
    assert (reply.reward, reply.correct, reply.done) == (1.0, True, True)
    environment.close()
    assert [*(home / "containers").iterdir()] == []
    log = (home / "log").read_text()
    assert '["build", "--quiet"' in log and '"sha256:1", "sleep", "infinity"' in log


def test_work_that_is_not_done_has_the_reward_of_the_tests(opened):
    environment = opened(test="echo '{\"reward\": 0.25}' > /logs/verifier/reward.json\nexit 1\n")
    reply = environment.step(DONE)
    assert (reply.reward, reply.correct) == (0.25, False)


def test_a_reward_that_the_policy_wrote_is_none(opened):
    environment = opened(test="true\n")
    called(environment, "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt")
    with pytest.raises(InfrastructureError, match="one wrote no /logs/verifier/reward.txt"):
        environment.step(DONE)


def test_a_command_that_takes_too_long_is_ended(opened):
    environment = opened(command_s=0.5, step_s=60.0)
    assert called(environment, "echo a; exec sleep 60") == "a\n(ended after 0.5 s)"


def test_the_container_has_what_the_task_asks_for(opened, home):
    toml = "[environment]\ndocker_image = 'a:1'\nmemory_mb = 64\ncpus = 2\nallow_internet = false"
    opened(toml)
    log = (home / "log").read_text()
    options = '"--memory", "64m", "--cpus", "2", "--network", "none", "a:1", "sleep"'
    assert options in log and "build" not in log


@pytest.mark.parametrize("verb", ["all", "exec", "cp"])
def test_a_lost_engine_is_no_reward(opened, home, verb):
    environment = opened()
    (home / "broken").write_text(verb)
    with pytest.raises(InfrastructureError, match="Cannot connect|exec failed|wrote no"):
        environment.step(DONE)


def test_a_lost_container_is_no_answer_of_a_tool(opened, home):
    environment = opened()
    environment.close()
    with pytest.raises(InfrastructureError, match="the container of .* has ended"):
        called(environment, "echo 1")


def test_tests_that_write_no_number_are_no_reward(opened):
    environment = opened(test="echo good > /logs/verifier/reward.txt\n")
    with pytest.raises(InfrastructureError, match="wrote 'good.*', which is not a reward"):
        environment.step(DONE)


def test_tasks_are_trained_or_held_out(make, tmp_path):
    for number in range(8):
        write_task(tmp_path / "tasks" / str(number), f"task {number}")
    task = make(held_out_fraction=0.25)
    held_out = {prompt.text for prompt in task.eval_prompts(9)}
    trained = {task.prompt(number).text for number in range(12)}
    assert len(held_out) == 2 and len(trained) == 6 and not held_out & trained


def test_a_folder_without_tasks_is_refused(make, tmp_path):
    with pytest.raises(ConfigError, match="task.path: .* holds no folders with task.toml; each"):
        make()
    write_task(tmp_path / "tasks" / "one", "a")
    (tmp_path / "tasks" / "one" / "tests" / "test.sh").unlink()
    with pytest.raises(ConfigError, match="task.path: '.*one' has no tests/test.sh; a task has"):
        make()
