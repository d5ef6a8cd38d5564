"""Parts of a server that its models and samplers share."""

from dataclasses import dataclass
from pathlib import Path

from rl.observe.events import Events
from rl.session.session import Session
from rl.tinker.checkpoints import Checkpoints
from rl.tinker.forward_backward import Limits
from rl.tinker.futures import Futures
from rl.tinker.samples import Samples
from rl.tinker.store import Store


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Session of a server, and the server's memory."""

    session: Session
    store: Store
    futures: Futures
    checkpoints: Checkpoints
    events: Events
    limits: Limits
    folder: Path
    """Folder of the metrics and samples of models."""
    samples: Samples
    state_every: int
    """Number of optimizer steps between states of a model."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end a sample whose request names none."""
