"""Parts of a server that its models and samplers share."""

from collections.abc import Callable, Sequence
from pathlib import Path

from rl.config.serve import ServeConfig
from rl.model.shape import shape_of
from rl.observe.events import Events
from rl.session.session import Session
from rl.tinker.checkpoints import Checkpoints
from rl.tinker.custom_losses import CustomLosses
from rl.tinker.forward_backward import Limits
from rl.tinker.futures import Futures
from rl.tinker.samples import Samples
from rl.tinker.store import Store


class Parts:
    """Session of a server, and the server's memory in ``folder``."""

    def __init__(
        self,
        config: ServeConfig,
        session: Session,
        folder: Path,
        events: Events,
        *,
        stop_token_ids: tuple[int, ...] = (),
        decode: Callable[[Sequence[int]], str] = str,
    ):
        """``stop_token_ids`` end a sample whose request names none. ``decode`` makes tokens a text
        for people. By default the text has the numbers.
        """
        self.session = session
        self.events = events
        self.stop_token_ids = stop_token_ids
        self.state_every = config.state_every
        self.max_skipped = config.trainer.max_skipped_steps
        self.has_tokenizer = config.model.hf_path is not None
        self.longest = session.config.longest_sequence
        self.limits = Limits(
            vocab_size=shape_of(config.model).vocab_size,
            max_tokens=self.longest - 1,
            stand_ins=config.stand_ins,
        )
        self.store = Store(folder / "server.db", events.warn)
        self.futures = Futures()
        self.custom_losses = CustomLosses()
        self.checkpoints = Checkpoints(self.store, folder / "weights", events.warn)
        self.heard: dict[str, float] = {}
        """Monotonic time of the latest sign of life of each session."""
        self.folder = folder / "models"
        """Folder of the metrics and samples of models."""
        self.samples = Samples(self.folder, decode)
