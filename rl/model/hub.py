"""Models of the Hugging Face Hub: from a name to a folder in the cache of ``huggingface_hub``.

Endpoint, cache, token and offline mode are those of its environment variables.
"""

import io
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any, Self

from rl.errors import ConfigError, require, require_value
from rl.model.hugging_face_config import read_json

DESCRIPTIONS = ("*.json", "*.jinja", "*.txt", "*.model")
"""Files of a model's folder beside its weights: config, tokenizer, templates, index."""
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
POINTER = b"version https://git-lfs"
"""Begin of a file of Git LFS that stands for another."""
TELL_S = 5.0


class Snapshot(str):
    """Folder of a commit of a repository: a path on this host, made from a name on the Hub."""

    name: str
    """Name of the repository."""
    commit: str
    """Hash of the commit."""

    def __new__(cls, folder: str, name: str = "", commit: str = "") -> Self:
        snapshot = super().__new__(cls, folder)
        snapshot.name = name
        snapshot.commit = commit
        return snapshot

    def missing(self) -> dict[str, int]:
        """Return the files of weights that are not on this host: sizes by name, 0 if unknown."""
        index = Path(self, INDEX)
        names = sorted({*read_index(index).values()} if index.is_file() else {ONE_FILE})
        sizes = self.sizes()
        return {name: sizes.get(name, 0) for name in names if not Path(self, name).is_file()}

    def sizes(self) -> dict[str, int]:
        """Return the size of each file of the repository by name; of those on this host if the
        cache lacks the Hub's listing.
        """
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        with suppress(CachedRepoTreeNotFoundError):
            listing = get_cached_repo_tree(self.name, revision=self.commit)
            return {file.path: file.size for file in listing}
        return {path.name: path.stat().st_size for path in Path(self).iterdir()}

    @property
    def remedy(self) -> str:
        """Advice to a host that lacks the folder."""
        fix = "set HF_HOME to a folder that all nodes share, or run there: hf download"
        return f"on {socket.gethostname()}, {fix} {self.name} --revision {self.commit}"

    def fetch(self, tell: Callable[[str], object], *, field: str) -> None:
        """Download the weights that are not on this host; ``tell`` gets lines of progress.

        Raises ConfigError, naming ``field``, if the disk is too small or the download fails.
        """
        missing = self.missing()
        total = sum(missing.values())
        repository = Path(self).parents[1]
        free = shutil.disk_usage(repository).free
        problem = f"{self.name} takes {_mb(total)} more, and {repository.parent} has {_mb(free)}"
        fix = "make room, or set HF_HOME to a folder on a larger disk"
        require(total <= free, problem, field=field, fix=fix)
        from tqdm import tqdm

        name = self.name

        class Lines(tqdm):
            def display(self, *_: object, **__: object) -> None:
                if self.desc.startswith("Downloading"):
                    tell(f"downloading {name}: {_mb(self.n)} of {_mb(total)}")

        lines = partial(Lines, mininterval=TELL_S, file=io.StringIO())
        with _refusing(name, self.commit, field):
            _download(name, self.commit, [*map(escape, missing)], tqdm_class=lines)


def locate(model: Any, section: str) -> None:
    """Replace a name on the Hub in ``model.hf_path`` by its :class:`Snapshot`, and
    ``model.revision`` by the commit. Download the files beside the weights that this host lacks.

    ``model`` is the ModelConfig in ``section``. A folder stays as it is. Raises ConfigError.
    """
    path = model.hf_path
    if path is not None and path.startswith("~"):
        path = model.hf_path = os.path.expanduser(path)
    if path is None or not is_name(path):
        rule = f"None, unless {section}.hf_path is a name on the Hub"
        holds = model.revision is None or isinstance(path, Snapshot)
        require_value(holds, f"{section}.revision", model.revision, rule)
        return
    from huggingface_hub import HfApi, is_offline_mode

    field = f"{section}.hf_path"
    with _refusing(path, model.revision, field):
        commit = HfApi().resolve_revision(path, revision=model.revision).resolved
        folder = _download(path, commit, DESCRIPTIONS, local_files_only=is_offline_mode())
    snapshot = Snapshot(folder, path, commit)
    has_weights = not {ONE_FILE, INDEX}.isdisjoint(snapshot.sizes())
    fix = "name a repository with safetensors"
    require(has_weights, f"{path!r} has no {ONE_FILE} on the Hub", field=field, fix=fix)
    model.hf_path = snapshot
    model.revision = commit


def is_name(path: str) -> bool:
    """Whether ``path`` may be a name on the Hub, such as ``Qwen/Qwen3-0.6B``, and not the path of a
    file or folder.
    """
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path) is not None and not Path(path).exists()


def refuse_pointer(path: str | Path, field: str) -> None:
    """Raise ConfigError, naming ``field``, if a file is one of Git LFS that stands for another."""
    problem = f"{str(path)!r} is a pointer of Git LFS, without the content of the file"
    fix = "run there: git lfs install; git lfs pull"
    with suppress(OSError), open(path, "rb") as file:  # its reader says why it cannot be read
        require(file.read(len(POINTER)) != POINTER, problem, field=field, fix=fix)


def read_index(path: Path) -> dict[str, str]:
    """Return {tensor: file name} of an index. Raises ConfigError if it is damaged."""
    files = read_json(path.name, path).get("weight_map")
    names = list(files.values()) if isinstance(files, dict) else []
    is_map = bool(names) and all(isinstance(name, str) for name in names)
    require(is_map, f"{path} has no weight_map, which gives the file of each tensor")
    for name in set(names):
        require(Path(name).name == name, f"{path} names {name!r}; it must be a file of the folder")
    return files  # type: ignore[return-value]


def title_of(path: object) -> str:
    """Return ``path`` as people read it: of a snapshot, name, commit and what is to download."""
    if not isinstance(path, Snapshot):
        return str(path)
    return f"{path.name}, commit {path.commit}, {_mb(sum(path.missing().values()))} to download"


def _download(name: str, commit: str, patterns: Any, **options: Any) -> str:
    """Return the folder of a commit, with the files of its root that match ``patterns``."""
    from huggingface_hub import snapshot_download

    options |= {"allow_patterns": patterns, "ignore_patterns": "*/*"}
    return snapshot_download(name, revision=commit, **options)


@contextmanager
def _refusing(name: str, revision: str | None, field: str) -> Iterator[None]:
    """Raise ConfigError, naming ``field``, for an error of ``huggingface_hub`` in the block."""
    import httpx
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    try:
        yield
        return
    except errors.RevisionNotFoundError:
        problem = f"{name} has no branch, tag or commit {revision!r}"
        fix = f"correct it, or leave it out for the default branch of {hub}/{name}"
        field = f"{field.rpartition('.')[0]}.revision"
    except errors.GatedRepoError:
        problem = f"{name!r} is gated"
        fix = f"accept its licence at {hub}/{name} and set HF_TOKEN to a token of that account"
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        problem = f"there is no folder {name!r}, and {hub} shows no repository of that name"
        fix = "correct it, or set HF_TOKEN if the repository is private"
    except (errors.RevisionResolutionError, errors.LocalEntryNotFoundError):
        why = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else f"{hub} does not answer"
        copy = f"{constants.HF_HUB_CACHE} has no complete copy of such a repository"
        problem = f"there is no folder {name!r}, {why}, and {copy}"
        fix = f"run hf download {name} with a connection to the Hub"
    except (httpx.HTTPError, OSError) as error:
        problem = f"the download of {name} failed: {' '.join(str(error).split())[:300]}"
        fix = "start again; files that are complete are kept"
    raise ConfigError(problem, field=field, fix=fix)


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
