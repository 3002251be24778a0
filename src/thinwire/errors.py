"""The one exception tree.

    ThinwireError
    ├── ConfigError        what you asked for cannot be: an unknown id or option, a value out of range
    ├── NonFiniteError     a tensor holds NaN or Inf, or a scale would overflow; nothing was changed
    ├── FrameError         bytes that claim to be a frame and are not
    ├── ProtocolError      a peer broke the conversation: wrong shapes, wrong step, wrong version
    │   ├── SessionLostError  the server no longer knows this worker: start it again
    │   └── ServerStoppedError  a person, or a scheduler, has stopped the server
    ├── TransportError     bytes could not be moved: no server, a broken connection, a port in use
    │   └── DeadlineError  nobody answered in time
    ├── DataError          a data set is missing or damaged
    └── EngineError        a process or a link could not be set up, or died

`ConfigError` and `DataError` are local misuse; `FrameError` and `ProtocolError` are remote misbehaviour.
A message says what came, what was expected and what to change.
"""

from __future__ import annotations

import collections.abc
import difflib


class ThinwireError(Exception):
    """Anything that thinwire raises on purpose."""


class ConfigError(ThinwireError, ValueError):
    """A configuration that cannot be: the message lists what is allowed."""


class NonFiniteError(ThinwireError, ValueError):
    """A tensor with NaN or Inf, or a scale past the largest finite number. No state was changed."""


class FrameError(ThinwireError, ValueError):
    """Bytes that are not a valid frame. The only exception that decoders let out for bad bytes."""


class ProtocolError(ThinwireError):
    """A peer said something that the conversation does not allow."""


class SessionLostError(ProtocolError):
    """The server no longer knows this worker's session: it was restarted, or went on without this worker."""


class ServerStoppedError(ProtocolError):
    """The server was stopped before the training's end; no worker is at fault."""


class TransportError(ThinwireError, ConnectionError):
    """Bytes could not be moved between processes."""


class DeadlineError(TransportError, TimeoutError):
    """A peer did not answer within the deadline."""


class DataError(ThinwireError):
    """A data set that is missing or damaged; the message says what to do."""


class EngineError(ThinwireError, RuntimeError):
    """A process or an emulated link that could not be set up, or that ended too early."""


def check_keys(
    state: collections.abc.Mapping[str, object], keys: collections.abc.Iterable[str], of: str = "the state"
) -> None:
    """Raises ConfigError where a saved state lacks one of these keys, and names it.

    >>> check_keys({"step": 3}, ["step"])
    """
    if lacking := [key for key in keys if key not in state]:
        raise ConfigError(f"{of} lacks {', '.join(map(repr, lacking))}; take one that this version has saved")


def guess(word: object, known: collections.abc.Iterable[str]) -> str:
    """Returns what an unknown name was probably meant for, as a part of a message; nothing where none is near.

    >>> guess("LeNet6", ["mlp", "lenet5"]), guess("x", ["mlp"])
    (" (did you mean 'lenet5'?)", '')
    """
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(str(word)[:100].lower(), names, n=1)
    return f" (did you mean {names[close[0]]!r}?)" if close else ""
