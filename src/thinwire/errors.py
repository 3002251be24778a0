"""The one exception tree.

    ThinwireError
    ├── ConfigError        an invalid configuration: an unknown id or option, a value out of range
    ├── NonFiniteError     a tensor holds NaN or Inf, or a scale would overflow; nothing was changed
    ├── FrameError         bytes that claim to be a frame and are not
    ├── ProtocolError      a peer broke the protocol: wrong shapes, wrong step, wrong version
    │   ├── SessionLostError  the server no longer knows this worker: start it again
    │   └── ServerStoppedError  a person, or a scheduler, has stopped the server
    ├── TransportError     bytes could not be moved: no server, a broken connection, a port in use
    │   └── DeadlineError  no answer came in time
    ├── DataError          a data set is missing or damaged
    └── EngineError        a process or a link could not be set up, or died

`ConfigError` and `DataError` are local misuse; `FrameError` and `ProtocolError` are remote misbehaviour.
A message gives the received value, the expected ones and the remedy.
"""

from __future__ import annotations

import collections.abc
import difflib


class ThinwireError(Exception):
    """The base of all errors that thinwire raises on purpose."""


class ConfigError(ThinwireError, ValueError):
    """An invalid configuration: the message lists the allowed values."""


class NonFiniteError(ThinwireError, ValueError):
    """A tensor with NaN or Inf, or a scale past the largest finite number. No state was changed."""


class FrameError(ThinwireError, ValueError):
    """Bytes that are not a valid frame. The only exception that decoders raise for bad bytes."""


class ProtocolError(ThinwireError):
    """A peer sent a message that the protocol does not allow."""


class SessionLostError(ProtocolError):
    """The server no longer knows this worker's session: it was restarted, or continued without this worker."""


class ServerStoppedError(ProtocolError):
    """The server was stopped before the training's end; no worker is at fault."""


class TransportError(ThinwireError, ConnectionError):
    """Bytes could not be moved between processes."""


class DeadlineError(TransportError, TimeoutError):
    """A peer did not answer within the deadline."""


class DataError(ThinwireError):
    """A data set that is missing or damaged; the message gives the remedy."""


class EngineError(ThinwireError, RuntimeError):
    """A process or an emulated link that could not be set up, or that ended too early."""


def check_keys(
    state: collections.abc.Mapping[str, object], keys: collections.abc.Iterable[str], of: str = "the state"
) -> None:
    """Raises ConfigError that names the missing keys where a saved state lacks any of these.

    >>> check_keys({"step": 3}, ["step"])
    """
    if lacking := [key for key in keys if key not in state]:
        raise ConfigError(f"{of} lacks {', '.join(map(repr, lacking))}; take one that this version has saved")


def guess(word: object, known: collections.abc.Iterable[str]) -> str:
    """Returns the known name nearest to an unknown one, as a part of a message; empty where none is near.

    >>> guess("LeNet6", ["mlp", "lenet5"]), guess("x", ["mlp"])
    (" (did you mean 'lenet5'?)", '')
    """
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(str(word)[:100].lower(), names, n=1)
    return f" (did you mean {names[close[0]]!r}?)" if close else ""
