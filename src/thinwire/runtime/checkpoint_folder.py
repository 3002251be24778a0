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
        folder: created if missing.
        every: exchanges between two checkpoints.
        resume: whether to resume from the newest step that all processes have.
    """

    folder: Path
    every: int = 100
    resume: bool = False

    def check_files(self, files: Iterable[Path], resuming: str = "--resume") -> None:
        """Makes the folder, and checks that these files can be written.

        A run that does not resume begins without files, so every file found there later is its own.

        Args:
            files: of all processes.
            resuming: the option that resumes a run, for messages.

        Raises:
            ConfigError: no folder, no permission, files of another run, or processes of another run that write there
                and may have no checkpoint yet.
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
                f"replace: resume from them with {resuming}, or give another folder"
            )
        for path in files:
            try_out(path, resumes=self.resume)

    def server(self, index: int) -> Path:
        """Returns the path of shard `index`'s file."""
        return self.folder / f"server-{index}.checkpoint"

    def arguments(self, path: Path, step: int | None, *, again: bool = False) -> list[str]:
        """Returns one process's command-line options.

        Args:
            path: of its file.
            step: to resume from; None: it begins, or resumes from its newest where each process counts its own steps.
            again: the process was started before, and resumes from the newest step that all processes have. Without a
                file of this run, or of the run that it resumes, it begins anew; see `check_files`.
        """
        arguments = ["--checkpoint", str(path), "--checkpoint-every", str(self.every)]
        if again:
            # A process killed between the two renames leaves `FILE.previous` alone.
            return [*arguments, "--resume"] if checkpoint.files_at(path) else arguments
        begins = step is not None and not checkpoint.files_at(path)  # of `forget_lacking`
        if self.resume and not begins:
            arguments.append("--resume" if step is None else f"--resume={step}")
        return arguments
