"""When a shard writes its checkpoints, and where it goes on from."""

from __future__ import annotations

from pathlib import Path

from thinwire.errors import ConfigError
from thinwire.runtime.checkpoint import LOCAL, read, remove_unfinished, write
from thinwire.runtime.disk import Disk
from thinwire.server.core import ServerCore


class Checkpointer:
    """Writes a shard's state to a file at every so many steps, and reads it back.

    Args:
        core: the shard.
        path: of the file; the one before it stays as `FILE.previous`.
        every: steps (updates of every table) between two checkpoints.
        disk: the file system.

    Raises:
        ConfigError: a number of steps below 1.
    """

    KIND = "server"

    def __init__(self, core: ServerCore, path: Path, every: int, disk: Disk = LOCAL) -> None:
        if every < 1:
            raise ConfigError(f"a checkpoint every {every} steps; at least 1 is needed")
        self._core, self._path, self._every, self._disk = core, path, every, disk
        self._step = core.step
        remove_unfinished(path, disk)

    def resume(self, step: int | None = None) -> None:
        """Loads the newest checkpoint, or that of a step, before anybody joins.

        Raises:
            ConfigError: there is none, or it is damaged or another's.
        """
        self._core.load_state_dict(read(self._path, self.KIND, step, self._disk))
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
                write(self._path, self.KIND, step, self._core.state_dict(), self._disk)
