"""``import rl`` is small, and gives what it promises."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import rl

HEAVY = ("torch", "torchtitan", "torchao", "vllm", "monarch", "transformers", "numpy", "tyro")

LOOK = """
import json, logging, os, signal, sys
names = ["torchao", "torch.utils._pytree", "vllm", "root"]
state = lambda: (
    [logging.getLogger(name).level for name in names],
    len(logging.getLogger().handlers),
    dict(os.environ),
    repr(signal.getsignal(signal.SIGINT)),
    sys.stdout is sys.__stdout__,
    list(sys.path_hooks) == hooks,
)
hooks = list(sys.path_hooks)
before = state()
loaded = {*sys.modules}
import rl
same = state() == before
print(json.dumps([same, sorted({*sys.modules} - loaded)]))
"""


def python(code: str) -> str:
    """Return what ``code`` prints in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout


def test_import_rl_loads_little_and_changes_nothing_else():
    same, loaded = json.loads(python(LOOK))
    assert same, "environment, signals, logging and streams are as they were"
    assert not [name for name in loaded if name.split(".")[0] in HEAVY]
    assert {name for name in loaded if name.startswith("rl")} == {
        *("rl", "rl.cli", "rl.cli.program", "rl.errors", "rl.host", "rl.host.process")
    }
    assert len(loaded) < 100, loaded


def test_every_public_name_resolves():
    for name in rl.__all__:
        value = getattr(rl, name)
        assert getattr(value, "__name__", name).split(".")[-1] == name
    assert {*rl.__all__} == {*rl._SOURCES} <= {*dir(rl)}
    assert sorted(rl.__all__) == rl.__all__


def test_editors_see_the_same_names():
    tree = ast.parse(Path(rl.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    seen = {
        alias.name: getattr(node, "module", None) for node in block.body for alias in node.names
    }
    assert {*seen} == {*rl.__all__}
    for name, source in rl._SOURCES.items():
        module, _, attribute = source.partition(":")
        assert seen[name] == (module if attribute else module.rpartition(".")[0] or None)


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(rl, "nothing")


DEVICE = """
import sys
import torch
import torchtitan.distributed.utils as before
import torchtitan.tools.profiler as of_module
import rl.training.trainer_config
import torchtitan.models.common.token_dispatcher as after
from rl.host.platform import device_type
kind = "cuda" if torch.cuda.is_available() else "cpu"
assert before.device_type == after.device_type == device_type() == kind
assert before.device_module is after.device_module is torch.get_device_module(kind)
assert of_module.device_module is before.device_module
import rl.generation.engine
print("vllm" in sys.modules)
"""


def test_the_device_is_torchtitans_and_an_engine_imports_vllm_only_when_it_starts():
    assert python(DEVICE) == "False\n"


def test_a_plan_on_cpu_imports_neither_compilers_nor_datasets():
    command = [sys.executable, "-X", "importtime", "-m", "rl.plan", "--config", "quickstart"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "torchtitan.models.common.attention" in loaded
    assert not loaded & {"datasets", "torch._inductor.compile_fx", "torchtitan.trainer"}


MASK = """
import rl.training
import torch
from torchtitan.models.common.attention import create_attention_mask
with torch.compiler.set_stance("force_eager"):
    mask = create_attention_mask(lambda b, h, q, k: q >= k, 1, None, 256, 256, device="cpu")
print(mask.shape)
"""


def test_functions_that_torchtitan_compiles_are_compiled_when_called():
    assert python(MASK) == "(1, 1, 256, 256)\n"
