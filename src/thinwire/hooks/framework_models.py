"""The base of the callbacks of frameworks: the exchange that suits the model that the framework has wrapped."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.codecs import Codec
from thinwire.hooks import ddp, fsdp
from thinwire.hooks.auto_checks import adapts
from thinwire.hooks.auto_optimizer import AutoOptimizer
from thinwire.hooks.distribute import distribute
from thinwire.hooks.exchange.state import ExchangeState
from thinwire.hooks.wrapping import is_sharded
from thinwire.runtime.metrics import JsonLines


class WrappedModel:
    """The exchange of a model that a framework trains.

    Args:
        codec: as in `ddp.compress`, or `fsdp.compress`. Without one thinwire chooses what is exchanged, as
            `tw.distribute(model, optimizer)` does where there is one optimizer: of SGD, and of what FSDP2 has sharded,
            gradients by `"auto"`; of adaptive optimizers, AdamW too, local updates or a plain all-reduce. A training
            that resumes chooses anew, and with local updates from rank 0's weights and moments.
        telemetry: a file of JSON lines, for `thinwire watch` and `thinwire report`: every rank adds records of every
            tenth step, and the losses that the framework logs.
        options: likewise, such as `sparsity=1.0`, `codecs={…}` or `start_step=50`; or of `tw.distribute`. With float16
            the framework's GradScaler is given by itself, with `nonfinite="skip"`.

    Attributes:
        state: what `ddp.compress` or `fsdp.compress` returned, once the training has begun: print
            `ddp.report(callback.state)`, or `fsdp.report`.
        optimizer: what `tw.distribute` returned in its place; its `report()` says what was chosen, and sent.
    """

    def __init__(self, codec: str | Codec | None, telemetry: str | Path | None, options: dict[str, Any]) -> None:
        self.state: ExchangeState | None = None
        self.optimizer: AutoOptimizer | None = None
        self._codec, self._telemetry, self._options = codec, telemetry, options
        self._model: weakref.ref[nn.Module] | None = None

    def _has_hook(self, model: nn.Module) -> bool:
        """Whether the state is of this wrapper, and not of an earlier one."""
        return self.state is not None and self._model is not None and self._model() is model

    def _compress(self, model: nn.Module, scaler: Any) -> ExchangeState:
        """Puts the hook on a model that the framework has wrapped.

        Args:
            model: as the framework trains it.
            scaler: the framework's GradScaler for float16, None where it has none. It finds its scale by steps that
                overflow, which have to be skipped; whoever names `scaler` or `nonfinite` has decided.
        """
        options = self._options
        if scaler is not None and "scaler" not in options and "nonfinite" not in options:
            options = {**options, "nonfinite": "skip", "scaler": scaler}
        codec = "auto" if self._codec is None else self._codec
        compress = fsdp.compress if is_sharded(model) else ddp.compress
        self.state, self._model = compress(model, codec, **options), weakref.ref(model)
        if self._telemetry is not None:
            self.state.record_to(JsonLines(self._telemetry))
        return self.state

    def _distributes(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `tw.distribute` is to train the model, in place of a hook that codes gradients."""
        return self._codec is None and not is_sharded(model) and adapts(optimizer)

    def _distribute(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> AutoOptimizer:
        """Returns what takes the place of an optimizer, without the framework's wrapper."""
        metrics = () if self._telemetry is None else (JsonLines(self._telemetry),)
        made = distribute(model, optimizer, metrics=metrics, **self._options)
        assert isinstance(made, AutoOptimizer)
        self.optimizer = made
        return made

    def _give_back(self) -> torch.optim.Optimizer | None:
        """Gives all ranks the same weights, and returns the framework's own optimizer; None where it kept that."""
        if self.optimizer is None or self.optimizer.closed:
            return None
        self.optimizer.flush()
        self.optimizer.close()
        return self.optimizer.inner
