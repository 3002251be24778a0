"""Identifies callers by the names in their certificates and by their tokens, before any message is read."""

from __future__ import annotations

import re

from thinwire.errors import ConfigError, ProtocolError
from thinwire.security.tokens import TokenFile
from thinwire.transports.base import Identity
from thinwire.transports.trust import Caller

_WORKER = re.compile(r"worker-(\d{1,9})")


def worker_name(rank: int) -> str:
    """Returns the name that binds a certificate to a rank.

    >>> worker_name(3)
    'worker-3'
    """
    return f"worker-{rank}"


class Admission:
    """A server's check of callers.

    Args:
        tokens: a caller must present one of them; None requires none.

    Example:
        >>> admission = Admission(None)
        >>> admission(Caller(None, ("worker-3",)))
        Identity(name='worker-3', rank=3)
    """

    def __init__(self, tokens: TokenFile | None) -> None:
        self._tokens = tokens

    def __call__(self, caller: Caller) -> Identity:
        """Returns the caller's identity.

        Raises:
            ProtocolError: no token, a wrong token, or a certificate and a token of different ranks.
        """
        ranks = {int(match[1]) for name in caller.names if (match := _WORKER.fullmatch(name))}
        rank = self._rank_of_token(caller.token)
        if rank is not None:
            ranks.add(rank)
        if len(ranks) > 1:
            listed = " and ".join(map(str, sorted(ranks)))
            raise ProtocolError(f"its certificate and token are for ranks {listed}; give it those of one rank")
        return Identity(caller.names[0] if caller.names else "", next(iter(ranks), None))

    def _rank_of_token(self, shown: str | None) -> int | None:
        if self._tokens is None:
            return None
        if shown is None:
            raise ProtocolError(
                "it showed no token; give it --token-file (in Python Credentials(token_file=…)) with a token of the "
                "server's"
            )
        try:
            token = self._tokens.find(shown)
        except ConfigError as error:
            raise ProtocolError("the server cannot read its token file; repair that file on the server") from error
        if token is None:
            raise ProtocolError("the server does not know its token; copy the newest line of the server's token file")
        return token.rank
