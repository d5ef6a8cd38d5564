"""Files that clusters get, the following of a job, and the worker of a node."""

import json
import os
import re
import socket
import sys
from pathlib import Path

import pytest

from rl.cli.arguments import find_config
from rl.config import RLConfig
from rl.errors import ConfigError, RunError
from rl.launch import kubernetes, node, slurm
from rl.launch.freeze import SOURCE, Launch, as_json

GOLDEN = Path(__file__).parent / "golden"


def launch_of(config: RLConfig, folder: Path = Path("/runs/first")) -> Launch:
    return Launch("quickstart", config, folder, "unused")


def on_three_nodes() -> RLConfig:
    config = find_config("quickstart")()
    config.trainer.parallelism.data_parallel_shard_degree = config.trainer.nodes = 2
    config.generator.nodes = 1
    return config


def with_everything() -> RLConfig:
    """Every field of SlurmConfig is set, with characters that are special to a shell."""
    config = on_three_nodes()
    config.hardware.device = "h100"
    config.hardware.gpus_per_node = 8
    slurm = config.slurm
    slurm.partition = "gpu"
    slurm.account = "research"
    slurm.qos = "high"
    slurm.time = "1-00:00:00"
    slurm.nodes = 4
    slurm.cpus_per_node = 96
    slurm.memory = "1500G"
    slurm.constraint = "nvlink&ib"
    slurm.nodelist = "n[1-9]"
    slurm.exclude = "n7"
    slurm.exclusive = False
    slurm.extra = ["--reservation=mine", "--comment='two words'"]
    slurm.environment = {"NCCL_SOCKET_IFNAME": "ib0", "QUOTED": "it's $HOME"}
    slurm.prelude = ["module load cuda/12.8", "ulimit -l unlimited"]
    slurm.container_image = "/images/tiller.sqsh"
    slurm.container_mounts = ["/runs:/runs", "/data:/data"]
    slurm.warn_s = 600
    slurm.max_restarts = 3
    return config


def on_kubernetes() -> RLConfig:
    config = on_three_nodes()
    config.hardware.device = "h100"
    config.hardware.gpus_per_node = 8
    config.kubernetes.image = "tiller:1"
    config.kubernetes.claim = "runs"
    config.kubernetes.secret = "tokens"
    config.kubernetes.node_selector = {"gpu": "h100"}
    config.kubernetes.tolerations = ["nvidia.com/gpu=present:NoSchedule", "spot:NoExecute", "own"]
    config.kubernetes.memory = "900Gi"
    config.kubernetes.rdma = {"rdma/hca": "8"}
    return config


def assert_golden(name: str, text: str) -> None:
    """Check that ``text`` is the golden file, except for the paths of Tiller and Python."""
    path = GOLDEN / name
    text = text.replace(sys.executable, "PYTHON").replace(str(SOURCE), "TILLER")
    assert text == path.read_text(), f"if this is intended, write it to {path}:\n{text}"


def test_the_script_of_a_slurm_job():
    assert_golden("three_nodes.sh", slurm.script(launch_of(on_three_nodes())))


def test_all_slurm_options_are_set_before_the_shared_part():
    head, same, rest = slurm.script(launch_of(with_everything())).partition(slurm.BODY.read_text())
    assert (same, rest) == (slurm.BODY.read_text(), "")
    assert_golden("everything.sh", head)


def test_the_manifests_for_kubernetes():
    manifests = json.loads(kubernetes.manifests(launch_of(on_kubernetes())))
    config, *others = manifests["items"]
    assert json.loads(config["data"].pop("config.json"))["name"] == "quickstart"
    assert_golden("kubernetes.json", as_json({**manifests, "items": [config, *others]}))


def test_all_paths_of_the_manifests_are_in_the_shipped_image_or_in_a_mounted_volume():
    text = kubernetes.manifests(launch_of(on_kubernetes()))
    assert str(SOURCE) not in text
    dockerfile = (SOURCE / "Dockerfile").read_text()
    config, mesh, job = json.loads(text)["items"]
    for pod in (mesh["spec"]["podTemplate"]["spec"], job["spec"]["template"]["spec"]):
        (container,) = pod["containers"]
        image = container["workingDir"]
        assert f"WORKDIR {image}\nCOPY " in dockerfile
        assert "\nCOPY rl rl\n" in dockerfile
        inside = [mount["mountPath"] for mount in container["volumeMounts"]]
        for path in re.findall(r"(?<![\w/])/[\w./-]+", " ".join(container["command"])):
            if path.startswith(image):
                assert (SOURCE / Path(path).relative_to(image)).exists()
            else:
                assert any(Path(path).is_relative_to(folder) for folder in inside)
    assert job["metadata"]["name"] == config["metadata"]["name"]


@pytest.mark.parametrize(("exclusive", "memory"), [(True, "0"), (False, "")])
def test_a_node_without_other_jobs_gives_all_of_its_memory(exclusive, memory):
    config = on_three_nodes()
    config.slurm.exclusive = exclusive
    asked = [option for option in slurm.options(launch_of(config)) if option.startswith("--mem")]
    assert asked == ([f"--mem={memory}"] if memory else [])


def test_gpus_are_requested_in_the_form_of_the_site():
    config = with_everything()
    assert "--gpus-per-node=8" in slurm.options(launch_of(config))
    config.slurm.gpus_per_node = 0
    config.slurm.extra = ["--gres=gpu:h100:8"]
    options = slurm.options(launch_of(config))
    assert "--gres=gpu:h100:8" in options
    assert not [option for option in options if option.startswith("--gpus-per-node")]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("image", "", "kubernetes.image is empty; it must be set"),
        ("claim", "", "kubernetes.claim is empty; it must be set"),
        ("mount", "/volume", "output_dir is '/runs/first'; it must be below .*mount='/volume'"),
    ],
)
def test_missing_fields_of_kubernetes_are_named(field, value, message):
    config = on_kubernetes()
    setattr(config.kubernetes, field, value)
    with pytest.raises(ConfigError, match=message):
        kubernetes.manifests(launch_of(config))


def test_frozen_files_have_names_of_variables_and_no_values(tmp_path, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "s3cret")
    launch = launch_of(on_three_nodes(), tmp_path)
    launch.freeze({"job.sh": slurm.script(launch)})
    assert {path.name for path in launch.files.iterdir()} == {
        "config.json",
        "environment.json",
        "job.sh",
    }
    environment = json.loads((launch.files / "environment.json").read_text())
    assert "API_TOKEN" in environment["variables"]
    assert environment["packages"]["torchtitan"] == "0.3.0"
    assert not any("s3cret" in path.read_text() for path in launch.files.iterdir())


SLURM = {
    "partition": "gpu",
    "account": "research",
    "qos": "high",
    "time": "1-00:00:00",
    "nodes": 7,
    "gpus_per_node": 5,
    "cpus_per_node": 96,
    "memory": "1500G",
    "constraint": "nvlink",
    "nodelist": "n[1-9]",
    "exclude": "n7",
    "exclusive": False,
    "extra": ["--reservation=mine"],
    "environment": {"NAME": "value"},
    "prelude": ["module load cuda"],
    "container_image": "/images/tiller.sqsh",
    "container_mounts": ["/runs:/runs"],
    "warn_s": 600,
    "max_restarts": 3,
}


@pytest.mark.parametrize("field", SLURM)
def test_every_field_of_slurm_changes_the_script(field):
    config = with_everything()
    default = getattr(find_config("quickstart")().slurm, field)
    setattr(config.slurm, field, default)
    before = slurm.script(launch_of(config))
    setattr(config.slurm, field, SLURM[field])
    assert slurm.script(launch_of(config)) != before


KUBERNETES = {
    "namespace": "training",
    "image": "tiller:2",
    "claim": "others",
    "mount": "/runs/first",
    "secret": "keys",
    "source": "/tiller",
    "node_selector": {"gpu": "h200"},
    "tolerations": ["spot"],
    "memory": "1Ti",
    "rdma": {},
    "shared_memory": "7Gi",
    "warn_s": 77,
    "max_restarts": 7,
}


@pytest.mark.parametrize("field", KUBERNETES)
def test_every_field_of_kubernetes_changes_the_manifests(field):
    config = on_kubernetes()
    before = kubernetes.manifests(launch_of(config))
    setattr(config.kubernetes, field, KUBERNETES[field])
    assert kubernetes.manifests(launch_of(config)) != before


@pytest.fixture
def follow(tmp_path, monkeypatch):
    """Return a function that follows a job whose ``squeue`` runs the given lines of bash."""

    def follow(lines: str) -> int:
        (tmp_path / "squeue").write_text(f"#!/bin/bash\n{lines}\n")
        (tmp_path / "squeue").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setattr(slurm, "POLL_S", 0.01)
        return slurm.follow(launch_of(on_three_nodes(), tmp_path), "7")

    return follow


NO_ANSWER = 'echo "Unable to contact slurm controller" >&2; exit 1'


def test_following_survives_one_failure_of_squeue(follow, capsys):
    once = f'[ -e "$0.asked" ] || {{ touch "$0.asked"; {NO_ANSWER}; }}'
    assert follow(f"{once}; echo COMPLETED") == 1  # without a mark
    assert capsys.readouterr().out == "job 7: COMPLETED\n"


def test_following_ends_after_minutes_without_an_answer(follow, monkeypatch):
    monkeypatch.setattr(slurm, "NO_ANSWER_S", 0.1)
    with pytest.raises(RunError, match="Unable to contact slurm controller"):
        follow(NO_ANSWER)


def test_no_other_process_takes_the_port_before_the_worker_listens():
    with node.reserve("127.0.0.1") as reserved:
        address = reserved.getsockname()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
        with socket.create_server(address):  # with SO_REUSEADDR, as Monarch listens
            assert node.listens(*address)
