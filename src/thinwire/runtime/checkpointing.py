"""A shard's checkpoints: when one is due, and where it goes."""

from __future__ import annotations

from pathlib import Path

from thinwire.errors import ConfigError
from thinwire.runtime import checkpoint
from thinwire.server.core import ServerCore

KIND = "server"


class Checkpointer:
    """Writes a shard's state to a file at every so many steps, and reads it back.

    Args:
        core: the shard.
        path: of the file; the one before it stays as `FILE.previous`.
        every: steps (updates of every table) between two checkpoints.

    Raises:
        ConfigError: a number of steps below 1.
    """

    def __init__(self, core: ServerCore, path: Path, every: int) -> None:
        if every < 1:
            raise ConfigError(f"a checkpoint every {every} steps; at least 1 is needed")
        self._core, self._path, self._every = core, path, every
        self._step = core.step

    def resume(self, step: int | None = None) -> None:
        """Loads the newest checkpoint, or that of a step, before anybody joins.

        Raises:
            ConfigError: there is none, or it is damaged or another's.
        """
        self._core.load_state_dict(checkpoint.read(self._path, KIND, step))
        self._step = self._core.step

    def write_if_due(self) -> None:
        """Writes a checkpoint where one is due; called after every message, when its answers are on their way.

        Raises:
            ConfigError: the file cannot be written, or the policy of consistency leaves no step to keep.
        """
        step = self._core.step
        if step != self._step:
            self._step = step
            if step % self._every == 0 and self._core.failed is None:
                checkpoint.write(self._path, KIND, step, self._core.state_dict())
