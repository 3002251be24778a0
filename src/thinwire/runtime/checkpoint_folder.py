"""The folder in which the processes of one training write their checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import ConfigError
from thinwire.runtime import checkpoint
from thinwire.runtime.checkpointing import try_out
from thinwire.runtime.claim import claimed


@dataclass(frozen=True, kw_only=True)
class CheckpointFolder:
    """The checkpoints of a training's processes, in one folder.

    Args:
        folder: made if it is missing.
        every: exchanges between two checkpoints.
        resume: whether to go on from the newest step that all of them have.
    """

    folder: Path
    every: int = 100
    resume: bool = False

    def check_files(self, files: Iterable[Path], resuming: str = "--resume") -> None:
        """Makes the folder, and finds out whether these files can be written, of whatever training.

        Where it does not resume there are none when it begins: what is there later, this run has written.

        Args:
            files: every process's.
            resuming: how whoever calls it says that a run is resumed.

        Raises:
            ConfigError: there is no folder, or no permission; what lies there is another run's; or processes of another
                run write there, which may have no checkpoint yet.
        """
        if self.every < 1:
            raise ConfigError(f"a checkpoint every {self.every} steps; at least 1 is needed")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"checkpoints cannot be in {str(self.folder)!r}: {error.strerror}") from error
        files = list(files)
        for path in files:
            with claimed(path, resumes=self.resume):
                pass  # each process of this run claims its own
        there = [path.name for path in files if checkpoint.files_at(path)]
        if there and not self.resume:
            raise ConfigError(
                f"{str(self.folder)!r} holds checkpoints of an earlier training ({there[0]}, …), which this one would "
                f"replace: go on from them with {resuming}, or give another folder"
            )
        for path in files:
            try_out(path, resumes=self.resume)

    def server(self, index: int) -> Path:
        """Where shard `index` writes."""
        return self.folder / f"server-{index}.checkpoint"

    def arguments(self, path: Path, step: int | None, *, again: bool = False) -> list[str]:
        """The options of one process.

        Args:
            path: of its file.
            step: to go on from; None: it begins, or resumes from its newest where everybody counts their own.
            again: it was started before, and goes on from the newest step that all processes have. Without a file of
                this run, or of the one that it resumes, it begins anew; see `check_files`.
        """
        arguments = ["--checkpoint", str(path), "--checkpoint-every", str(self.every)]
        if again:
            # Killed between two renames, it has left an older name alone.
            return [*arguments, "--resume"] if checkpoint.files_at(path) else arguments
        begins = step is not None and not checkpoint.files_at(path)  # of `forget_lacking`
        if self.resume and not begins:
            arguments.append("--resume" if step is None else f"--resume={step}")
        return arguments
