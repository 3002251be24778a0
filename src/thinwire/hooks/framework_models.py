"""What a framework has wrapped: the exchange that suits the wrapper, for callbacks that find one or the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.codecs import Codec
from thinwire.hooks import ddp, fsdp
from thinwire.hooks.auto_checks import adapts
from thinwire.hooks.auto_optimizer import AutoOptimizer
from thinwire.hooks.distribute import distribute
from thinwire.hooks.exchange.options import with_scaler
from thinwire.hooks.exchange.state import ExchangeState
from thinwire.hooks.wrapping import is_sharded
from thinwire.runtime.metrics import JsonLines


def compress_wrapped(
    model: nn.Module,
    codec: str | Codec | None,
    options: dict[str, Any],
    scaler: Any,
    telemetry: str | Path | None = None,
) -> ExchangeState:
    """Compresses what ranks exchange of a model: `fsdp.compress` where FSDP2 has sharded it, else `ddp.compress`.

    Args:
        model: as the framework trains it.
        codec, options: of either; without a codec `auto`.
        scaler: the framework's GradScaler; None where it has none.
        telemetry: a file that step records are added to, if any.

    Raises:
        ConfigError, ProtocolError, TransportError: as of either.
    """
    given = with_scaler(options, scaler)
    codec = "auto" if codec is None else codec
    state = fsdp.compress(model, codec, **given) if is_sharded(model) else ddp.compress(model, codec, **given)
    if telemetry is not None:
        state.record_to(JsonLines(Path(telemetry)))
    return state


def distribute_wrapped(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: dict[str, Any],
    telemetry: str | Path | None = None,
) -> AutoOptimizer | None:
    """Returns what takes an adaptive optimizer's place; None where gradients are to be coded instead.

    Args:
        model: as the framework trains it.
        optimizer: without the framework's wrapper.
        options: of `tw.distribute`.
        telemetry: as of `compress_wrapped`.

    Raises:
        ConfigError, ProtocolError, TransportError: as of `tw.distribute`.
    """
    if is_sharded(model) or not adapts(optimizer):
        return None
    metrics = () if telemetry is None else (JsonLines(Path(telemetry)),)
    made = distribute(model, optimizer, metrics=metrics, **options)
    assert isinstance(made, AutoOptimizer)
    return made
