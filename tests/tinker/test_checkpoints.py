"""Weights survive whatever happens to the folder of a server, and to its database."""

import os
import shutil

import pytest

from tests.tinker.clients import Running


def absolute(folder):
    return folder.absolute()


def linked(folder):
    link = folder.with_name("link")
    link.symlink_to(folder.name)
    return link


def around(folder):
    return folder / ".." / folder.name


def moved(folder):
    return folder.rename(folder.with_name("moved"))


def restored(folder):
    backup = folder.with_name("backup")
    shutil.copytree(folder, backup)
    shutil.rmtree(folder)
    return backup


async def trained(folder):
    """Train a model in a new server; return the paths of its checkpoints and the weights."""
    async with Running(folder) as running:
        client = await running.train()
        await client.learn(1, 2)
        saved = await client.done(await client.call("save_weights", path="mine"))
        drawn = await client.done(await client.call("save_weights_for_sampler", path="drawn"))
        return client, saved["path"], drawn["path"], await client.weights()


async def require_whole(running, client, path, weights):
    client.running = running
    body = {"session_id": await running.open(7), "model_seq_id": 0}
    body |= {"path": path, "optimizer": True}
    assert (await running.result(await running.ask("load_weights", body)))["path"] == path
    assert await client.weights() == weights


@pytest.mark.parametrize("spelling", [absolute, linked, around, moved, restored])
async def test_a_folder_is_resumed_under_any_name(tmp_path, monkeypatch, spelling):
    monkeypatch.chdir(tmp_path)
    client, path, drawn, weights = await trained(tmp_path.relative_to(tmp_path) / "run")
    folder = spelling(tmp_path.relative_to(tmp_path) / "run")
    async with Running(folder) as running:
        await require_whole(running, client, path, weights)
        assert running.server.parts.checkpoints.find(drawn)
        assert running.warnings == []


async def test_a_database_with_paths_is_read(tmp_path):
    """Older servers noted folders as they were typed."""
    client, path, _, weights = await trained(tmp_path / "run")
    async with Running(tmp_path / "run") as running:
        store = running.server.parts.store
        for kind in ("model", "checkpoint", "sampler"):
            for name, fact in store.facts[kind].items():
                keys = [key for key in ("folder", "state", "live") if fact.get(key)]
                store.put(kind, name, fact | {key: f"old/weights/{fact[key]}" for key in keys})
        for name in [*store.facts["folder"]]:
            store.drop("folder", name)
    async with Running(tmp_path / "run") as running:
        await require_whole(running, client, path, weights)
        assert running.warnings == []


@pytest.mark.parametrize("is_lost", ["database", "weights"])
async def test_nothing_is_deleted_because_a_list_is_empty(tmp_path, is_lost):
    await trained(tmp_path / "run")
    before = {*os.listdir(tmp_path / "run/weights")}
    assert before
    if is_lost == "database":
        for file in (tmp_path / "run").glob("server.db*"):
            file.unlink()
    else:
        (tmp_path / "run/weights").rename(tmp_path / "run/elsewhere")
    async with Running(tmp_path / "run") as running:
        (warning,) = running.warnings
        assert ("kept" if is_lost == "database" else "lacks") in warning
    place = "weights" if is_lost == "database" else "elsewhere"
    assert {*os.listdir(tmp_path / "run" / place)} == before


async def test_folders_of_a_killed_process_are_deleted(tmp_path):
    running = await Running(tmp_path).__aenter__()
    new_folder = running.server.parts.checkpoints.new_folder
    with new_folder() as whole, new_folder() as partial:
        await running.server.parts.store.flush()
        whole.mkdir()
        partial.with_name(f"{partial.name}.partial").mkdir()
        await running.kill()
    async with Running(tmp_path) as running:
        assert os.listdir(tmp_path / "weights") == [] and running.warnings == []
        assert running.server.parts.store.facts["folder"] == {}
