"""Tokens: secrets in a text file, one a line, that authenticate workers.

    # comments and empty lines are ignored
    rank=3 8Qx1…     for rank 3 alone
    5tTz0…           for any rank

Two tokens may be valid at once for the same workers, an old and a new one, so that tokens can be replaced while a
training runs. The file is read again when it has changed.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.errors import ConfigError

TOKEN_NBYTES = 32
MIN_CHARACTERS = 16
MAX_CHARACTERS = 256
"""A token is sent in a header; gRPC accepts headers of some 8 kB."""
MAX_VALID = 2
"""The old and the new token."""

_LINE = re.compile(r"(?:rank=(\d{1,9})[ \t]+)?([!-~]+)")


@dataclass(frozen=True, slots=True)
class Token:
    """One line of a token file; `rank` None: for any rank."""

    secret: str = field(repr=False)
    rank: int | None = None


def new_token() -> str:
    """Returns a random secret of 256 bits as text."""
    return secrets.token_urlsafe(TOKEN_NBYTES)


def parse_tokens(text: str, origin: str) -> tuple[Token, ...]:
    """Reads the lines of a token file, called `origin` in messages. No message holds a secret.

    Raises:
        ConfigError: a line of another form, a secret that is too short or used for two ranks, more than two tokens for
            one rank, or no token.

    >>> parse_tokens("rank=3 0123456789abcdef # of the third site", "tokens")
    (Token(rank=3),)
    """
    tokens: list[Token] = []
    first: dict[str, tuple[int, int | None]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not (line := re.sub(r"(^|\s)#.*", "", line).strip()):
            continue
        at, match = f"{origin}, line {number}:", _LINE.fullmatch(line)
        if match is None or match[2].startswith("rank="):
            raise ConfigError(f"{at} expected TOKEN or rank=3 TOKEN, a token without blanks")
        rank, secret = None if match[1] is None else int(match[1]), match[2]
        if not MIN_CHARACTERS <= len(secret) <= MAX_CHARACTERS:
            raise ConfigError(
                f"{at} a token of {len(secret)} characters; {MIN_CHARACTERS} to {MAX_CHARACTERS} are expected, and "
                "random ones: `thinwire certs DIR` makes them"
            )
        before, of = first.setdefault(secret, (number, rank))
        if rank != of:
            raise ConfigError(
                f"{at} the token of line {before} again, for {_whose(rank)} and not {_whose(of)}; give each another "
                "token, or all of them one without a rank"
            )
        tokens.append(Token(secret, rank))
    if not tokens:
        raise ConfigError(f"{origin} holds no token; one a line is expected")
    for rank, count in Counter(token.rank for token in tokens).items():
        if count > MAX_VALID:
            raise ConfigError(
                f"{origin}: {count} tokens for {_whose(rank)}; at most two are valid at once, an old and a new one"
            )
    return tuple(tokens)


def _whose(rank: int | None) -> str:
    return "any rank" if rank is None else f"rank {rank}"


class TokenFile:
    """The present tokens of a file.

    Raises:
        ConfigError: the file cannot be read, or holds something else.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "tokens"
        >>> _ = path.write_text("rank=1 first-token-of-1\\nthe-token-of-all\\n")
        >>> tokens = TokenFile(path)
        >>> tokens.own(1), tokens.own(2)
        ('first-token-of-1', 'the-token-of-all')
        >>> tokens.find("first-token-of-1"), tokens.find("first-token-of-2")
        (Token(rank=1), None)
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._seen: tuple[int, ...] = ()
        self._tokens: Sequence[Token] = ()
        self.tokens()

    def tokens(self) -> Sequence[Token]:
        """Returns the file's tokens.

        Raises:
            ConfigError: the file cannot be read, or holds something else. Its earlier tokens are no longer valid.
        """
        try:
            status = self._path.stat()
            seen = status.st_mtime_ns, status.st_size, status.st_ino
            if seen != self._seen:
                self._seen, self._tokens = (), ()
                self._tokens = parse_tokens(self._path.read_text("utf-8-sig"), f"token file {str(self._path)!r}")
                self._seen = seen
        except (OSError, UnicodeDecodeError) as error:
            self._seen, self._tokens = (), ()
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ConfigError(f"token file {str(self._path)!r} cannot be read: {reason}") from error
        return self._tokens

    def own(self, rank: int | None) -> str:
        """Returns the secret of a worker: the first line for its rank, else the first for any rank.

        Raises:
            ConfigError: the file has none for this rank; or as `tokens`.
        """
        tokens = self.tokens()
        found = [token.secret for wanted in (rank, None) for token in tokens if token.rank == wanted]
        if not found:
            raise ConfigError(f"token file {str(self._path)!r} has no token for rank {rank}")
        return found[0]

    def find(self, secret: str) -> Token | None:
        """Returns the token with this secret, or None; the time that it takes depends on no secret or its length.

        Raises:
            ConfigError: as `tokens`.
        """
        shown, *own = (hashlib.sha256(each.encode()).digest() for each in (secret, *(t.secret for t in self.tokens())))
        same = [hmac.compare_digest(each, shown) for each in own]
        return next((token for token, is_it in zip(self._tokens, same, strict=True) if is_it), None)
