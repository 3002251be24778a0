"""What the hooks of equal ranks do before training: choose every tensor's codecs, meet the others, agree with them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from thinwire.codecs import Codec
from thinwire.collective.residuals import TrainedTensor
from thinwire.errors import ConfigError
from thinwire.policies.compression import PLAIN, ByShape, Choice, Compression, as_codec, select
from thinwire.runtime.peers import agree, measure_link
from thinwire.runtime.sealed import SealedPeerGroup
from thinwire.security.credentials import Credentials
from thinwire.security.tokens import TokenFile
from thinwire.transports.gloo import GlooPeerGroup
from thinwire.transports.peers import PeerGroup

DEFAULT_TIMEOUT = timedelta(minutes=30)


def check_options(
    *,
    nonfinite: object,
    scaler: object,
    gather_mb: object,
    timeout: object,
    seed: object,
    min_numel: object,
    measure_link: object,
    credentials: object,
    compression: object = None,
    start_step: object = 0,
) -> None:
    """Raises ConfigError for options that cannot be."""
    if nonfinite not in ("raise", "skip"):
        raise ConfigError(f"nonfinite={nonfinite!r}; allowed are 'raise' and 'skip'")
    if scaler is not None and nonfinite != "skip":
        raise ConfigError("a GradScaler finds its scale by steps that overflow; with scaler, set nonfinite='skip'")
    for name, number in (("start_step", start_step), ("min_numel", min_numel)):
        if not isinstance(number, int | np.integer) or isinstance(number, bool) or number < 0:
            raise ConfigError(f"{name}={number!r}; it must be 0 or more, a whole number")
    if not isinstance(seed, int | np.integer) or not isinstance(measure_link, bool):
        raise ConfigError(f"seed={seed!r}, measure_link={measure_link!r}; they are a whole number, and True or False")
    if compression is not None and not hasattr(compression, "choose"):
        raise ConfigError(f"compression={compression!r}; it is a policy, such as thinwire.policies.compression.ByShape")
    if not (credentials is None or isinstance(credentials, Credentials)):
        raise ConfigError(f"credentials={credentials!r}; they are tw.Credentials(token_file=…)")
    if not isinstance(gather_mb, int | float) or not 0 <= gather_mb < float("inf"):
        raise ConfigError(f"gather_mb={gather_mb!r}; it must be 0 or more megabytes")
    if not (timeout is None or (isinstance(timeout, timedelta) and timeout > timedelta(0))):
        raise ConfigError(f"timeout={timeout!r}; it is a datetime.timedelta above 0, as in timedelta(seconds=60)")


def choose(
    shapes: Mapping[str, tuple[int, ...]],
    codec: str | Codec,
    options: Mapping[str, Any],
    *,
    codec_down: str | Codec | None,
    min_numel: int,
    exclude: Callable[[str, tuple[int, ...]], bool] | None,
    codecs: Mapping[str, str | Codec] | None,
    last_layer: str | Codec | None,
    compression: Compression | None,
) -> dict[str, Choice]:
    """Returns every tensor's codecs. NaN and Inf are refused: what then happens is the hook's to say, not a codec's.

    Args:
        shapes: of the tensors, by name, in the model's order.
        codec: of the gradients; an id with `options`, or a codec. The rest as in `ddp.compress`.

    Raises:
        ConfigError: codecs or options that cannot be.
    """
    if compression is None:
        up = as_codec(codec, dict(options))
        down = up if codec_down is None else as_codec(codec_down, {})
        compression = ByShape(up=up, down=down, min_numel=min_numel, exclude=exclude)
    chosen = select(shapes, compression, codecs=codecs, last_layer=last_layer)
    if as_codec(codec, dict(options)) != PLAIN and all(each == Choice(PLAIN, PLAIN) for each in chosen.values()):
        small = sum(len(shape) > 1 and prod(shape) < min_numel for shape in shapes.values())
        warnings.warn(
            f"nothing is compressed: all {len(shapes)} tensors travel as float32, {small} of them because they have "
            f"fewer than min_numel={min_numel} values, the others as biases, norm layers or exclusions",
            UserWarning,
            stacklevel=3,
        )
    return {
        name: Choice(replace(each.up, nonfinite="raise"), replace(each.down, nonfinite="raise"))
        for name, each in chosen.items()
    }


def meet(ranks: Sequence[int], timeout: timedelta, credentials: Credentials | None) -> PeerGroup:
    """Returns the way to other ranks, in a gloo group of its own; all of them call it. Sealed, with credentials.

    Raises:
        ConfigError: credentials without a token.
        ProtocolError: only some ranks have credentials.
        TransportError: not all ranks came.
    """
    secret = None if credentials is None else _secret(credentials)
    peers = GlooPeerGroup(ranks, timeout)
    agree(peers, {"credentials": secret is not None})
    return peers if secret is None else SealedPeerGroup(peers, secret)


def described(tensors: Sequence[TrainedTensor]) -> dict[str, Any]:
    """What every rank must have in common of the model and its codecs, as JSON values by name."""
    described: dict[str, Any] = {"parameters": len(tensors)}
    for tensor in tensors:
        described[f"parameter {tensor.name}"] = [tensor.numel, str(tensor.dtype)]
        described[f"codec of {tensor.name}"] = tensor.choice.up.config()
        described[f"codec_down of {tensor.name}"] = tensor.choice.down.config()
    names = "\n".join(tensor.name for tensor in tensors)
    return described | {"the parameters' order": xxhash.xxh3_64_hexdigest(names.encode())}


def measured(peers: PeerGroup, wanted: bool) -> float:
    """Returns bits per second of the slowest link, if that is to be measured; else 0. All ranks want the same."""
    return measure_link(peers) if wanted else 0.0


def check_floating(name: str, dtype: torch.dtype) -> None:
    """Raises ConfigError for a parameter without a gradient that a codec takes."""
    if not dtype.is_floating_point:
        raise ConfigError(f"parameter {name!r} has dtype {dtype}; only floating-point tensors are compressed")


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Returns the timeout that the user gave a process group."""
    for device in group._device_types:
        found = getattr(group._get_backend(device).options, "_timeout", None)
        if isinstance(found, timedelta):
            return found
    warnings.warn(f"the timeout of the process group is unknown; waiting {DEFAULT_TIMEOUT} for peers", stacklevel=3)
    return DEFAULT_TIMEOUT


def _secret(credentials: Credentials) -> bytes:
    """What all ranks share."""
    if credentials.token_file is None:
        raise ConfigError("between ranks messages are sealed with a token: give Credentials(token_file=…)")
    return TokenFile(credentials.token_file).own(None).encode()
