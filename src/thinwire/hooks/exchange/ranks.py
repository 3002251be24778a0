"""Connects ranks before training: their connections, their timeout, and a description of the model to compare."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from thinwire.cautions import caution
from thinwire.collective.trained import TrainedTensor
from thinwire.errors import ConfigError
from thinwire.runtime.peers import agree
from thinwire.runtime.sealed import SealedPeerGroup
from thinwire.security.credentials import Credentials
from thinwire.security.tokens import TokenFile
from thinwire.transports.gloo import GlooPeerGroup
from thinwire.transports.peers import PeerGroup

DEFAULT_TIMEOUT = timedelta(minutes=30)


def meet(ranks: Sequence[int], timeout: timedelta, credentials: Credentials | None) -> PeerGroup:
    """Returns connections to these ranks in a new gloo group, sealed if credentials are given; all ranks call it.

    Raises:
        ConfigError: credentials without a token.
        ProtocolError: only some ranks have credentials.
        TransportError: a rank did not connect.
    """
    secret = None if credentials is None else _secret(credentials)
    peers = GlooPeerGroup(ranks, timeout)
    agree(peers, {"credentials": secret is not None})
    return peers if secret is None else SealedPeerGroup(peers, secret)


def described(tensors: Sequence[TrainedTensor]) -> dict[str, Any]:
    """Returns the description of the model and its codecs that all ranks must share, as JSON values by name."""
    described: dict[str, Any] = {"parameters": len(tensors)}
    for tensor in tensors:
        described[f"parameter {tensor.name}"] = [tensor.numel, str(tensor.dtype)]
        described[f"codec of {tensor.name}"] = tensor.choice.up.config()
        described[f"codec_down of {tensor.name}"] = tensor.choice.down.config()
    names = "\n".join(tensor.name for tensor in tensors)
    return described | {"the parameters' order": xxhash.xxh3_64_hexdigest(names.encode())}


def check_floating(name: str, dtype: torch.dtype) -> None:
    """Raises ConfigError for a parameter with a dtype that codecs do not support."""
    if not dtype.is_floating_point:
        raise ConfigError(f"parameter {name!r} has dtype {dtype}; only floating-point tensors are compressed")


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Returns the timeout that the user gave a process group."""
    for device in group._device_types:
        found = getattr(group._get_backend(device).options, "_timeout", None)
        if isinstance(found, timedelta):
            return found
    caution(f"the timeout of the process group is unknown; waiting {DEFAULT_TIMEOUT} for peers")
    return DEFAULT_TIMEOUT


def _secret(credentials: Credentials) -> bytes:
    """Returns the token that all ranks share."""
    if credentials.token_file is None:
        raise ConfigError("between ranks messages are sealed with a token: give Credentials(token_file=…)")
    return TokenFile(credentials.token_file).own(None).encode()
