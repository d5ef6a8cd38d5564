"""A run whose model is a name on the Hub."""

import json
import os

from tests import warm
from tests.kit.chats import chat_rows, tiny_chat_model
from tests.kit.hub import Hub, files_of
from tests.kit.servers import serving

NAME = "tiller/tiny"
RUN = f"""\
rl.train --config sft_jsonl --model.hf_path {NAME} --model.max_seq_len 128 --task.max_tokens 96
--task.held_out_fraction 0.2 --examples_per_step 4 --validate_every 0 trainer.lora:on"""


def test_a_run_is_resumed_with_the_commit_that_it_began_with_and_without_the_hub(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in chat_rows(20)))
    files = files_of(tiny_chat_model(tmp_path))
    folder = tmp_path / "run"
    command = [*RUN.split(), "--task.path", str(rows), "--output-dir", str(folder)]

    def run(steps: int, *arguments: str, **variables: str) -> str:
        given = [*command, "--steps", str(steps), *arguments]
        environment = os.environ | hub.variables(tmp_path / "hf") | variables
        done = warm.run(*given, timeout=400, env=environment)
        assert done.returncode == 0, done.stderr
        model = json.loads((folder / "config.json").read_text())["config"]["model"]
        assert (model["hf_path"], model["revision"]) == (NAME, commit)
        adapter = json.loads((folder / "export/adapter/adapter_config.json").read_text())
        assert (adapter["base_model_name_or_path"], adapter["revision"]) == (NAME, commit)
        return done.stdout

    with serving(Hub()) as hub:
        commit = hub.add(NAME, files)
        said = run(1)
        assert said.startswith(f"downloading {NAME}: 0.0 MB of 0.6 MB\n")
        assert said.index("run folder: ") > said.index("downloading")
        hub.repositories[NAME].commit(files | {"config.json": b"{}"})
        calls = hub.calls
        said = run(2, "--resume", HF_HUB_OFFLINE="1")
        assert "resumed after step 1" in said
        assert "another model" not in said
        assert hub.calls == calls
