"""What a framework has wrapped: the exchange that suits the wrapper, for callbacks that find one or the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from thinwire.codecs import Codec
from thinwire.hooks import ddp, fsdp
from thinwire.hooks.exchange.options import with_scaler
from thinwire.hooks.exchange.state import ExchangeState
from thinwire.hooks.wrapping import is_sharded
from thinwire.runtime.metrics import JsonLines


def compress_wrapped(
    model: nn.Module, codec: str | Codec, options: dict[str, Any], scaler: Any, telemetry: str | Path | None = None
) -> ExchangeState:
    """Compresses what ranks exchange of a model: `fsdp.compress` where FSDP2 has sharded it, else `ddp.compress`.

    Args:
        model: as the framework trains it.
        codec, options: of either.
        scaler: the framework's GradScaler; None where it has none.
        telemetry: a file that step records are added to, if any.

    Raises:
        ConfigError, ProtocolError, TransportError: as of either.
    """
    given = with_scaler(options, scaler)
    state = fsdp.compress(model, codec, **given) if is_sharded(model) else ddp.compress(model, codec, **given)
    if telemetry is not None:
        state.record_to(JsonLines(Path(telemetry)))
    return state
