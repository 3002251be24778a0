"""What ranks and their launcher say to each other: a rank reports that it waits, and the launcher opens a gate.

A gate is a file, which processes in any network namespace see. Nothing here knows what is trained, or imports torch:
every process of every benchmark reads this.
"""

from __future__ import annotations

import time
from pathlib import Path

from thinwire.engines.events import Event
from thinwire.errors import EngineError

SILENCE_S = 900.0
"""How long ranks and their launcher wait for each other."""
WARM, STOPPED = "warm", "stopped"
"""The gates, in the order in which ranks come to them."""
_POLL_S = 0.01


class Warm(Event, frozen=True, kw_only=True):
    """A rank has warmed up, and waits."""


class Stepped(Event, frozen=True, kw_only=True):
    """Rank 0 has taken a measured step, the last of so many seconds of training."""

    step: int
    seconds: float


class Stopped(Event, frozen=True, kw_only=True):
    """A rank has taken its last measured step, and waits."""


class Gates:
    """Where ranks wait until their launcher lets all of them go on.

    Args:
        folder: of the gates; the launcher's and the ranks' are the same.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Gates(folder).open("warm")
        ...     Gates(folder).wait("warm")
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def open(self, name: str) -> None:
        """Lets all who wait at this gate, or come to it later, go on."""
        (self._folder / name).touch()

    def wait(self, name: str) -> None:
        """Returns once the gate is open.

        Raises:
            EngineError: it was not opened within `SILENCE_S`.
        """
        deadline = time.monotonic() + SILENCE_S
        while not (self._folder / name).exists():
            if time.monotonic() > deadline:
                raise EngineError(f"the launcher did not open the gate {name!r} within {SILENCE_S:g} s")
            time.sleep(_POLL_S)
