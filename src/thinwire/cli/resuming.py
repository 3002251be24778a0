"""`--resume[=auto|STEP]` of a process that writes checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from thinwire.cli import options
from thinwire.cli.lazy import lazily
from thinwire.errors import ConfigError

with lazily():
    from thinwire.runtime import checkpoint as checkpoint_files
    from thinwire.runtime import claim


@dataclass(frozen=True, slots=True)
class Resuming:
    """How a process begins.

    Args:
        resumes: from a checkpoint.
        step: which of its checkpoints; None: the newest.
    """

    resumes: bool
    step: int | None = None


def resuming(file: Path | None, every: int, resume: str | None) -> Resuming:
    """Returns how a process begins.

    Args:
        file: of its checkpoint.
        every: exchanges between two checkpoints.
        resume: `newest`, `auto` (the newest where there is one) or a step; None: it begins anew.

    Raises:
        ConfigError: options that need `--checkpoint`.
    """
    if resume is not None and file is None:
        raise ConfigError("--resume goes on from a checkpoint: say which with --checkpoint FILE")
    if every != options.CHECKPOINT_EVERY and file is None:
        raise ConfigError("--checkpoint-every writes checkpoints: say where with --checkpoint FILE")
    if resume == options.AUTO:
        return Resuming(file is not None and bool(checkpoint_files.files_at(file)))
    return Resuming(resume is not None, None if resume in (None, options.NEWEST) else int(resume))


def checkpoint_names(file: Path | None) -> list[Path]:
    """Returns a checkpoint's file, the one before it, and the lock that keeps other processes away."""
    if file is None:
        return []
    return [file.with_name(file.name + ending) for ending in ("", checkpoint_files.PREVIOUS, claim.LOCK)]
