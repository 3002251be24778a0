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
from thinwire.hooks.group_optimizer import GroupOptimizer
from thinwire.hooks.wrapping import is_sharded
from thinwire.runtime.metrics import JsonLines


class WrappedModel:
    """The exchange of a model that a framework trains.

    Args:
        codec: as in `ddp.compress`, or `fsdp.compress`. Without one thinwire chooses the exchange, as
            `tw.distribute(model, optimizer)` does with one optimizer: for SGD, and for models that FSDP2 has sharded,
            gradients by `"auto"`; for adaptive optimizers such as AdamW, local updates or a plain all-reduce. A
            training that resumes chooses anew, and with local updates from rank 0's weights and moments. An option
            `design="local-sgd[h=4]"` goes to `tw.distribute` in place of the choice.
        telemetry: a file of JSON lines, for `thinwire watch` and `thinwire report`: every rank adds records of every
            tenth step, and the losses that the framework logs.
        options: of the same functions, such as `sparsity=1.0`, `codecs={…}` or `start_step=50`; or of `tw.distribute`.
            With float16 the callback passes the framework's GradScaler, with `nonfinite="skip"`.

    Attributes:
        state: the result of `ddp.compress` or `fsdp.compress`, once the training has begun: print
            `ddp.report(callback.state)`, or `fsdp.report`.
        optimizer: the result of `tw.distribute`, if that was called; its `report()` shows the choice and its traffic.
    """

    def __init__(self, codec: str | Codec | None, telemetry: str | Path | None, options: dict[str, Any]) -> None:
        self.state: ExchangeState | None = None
        self.optimizer: AutoOptimizer | GroupOptimizer | None = None
        self._codec, self._telemetry, self._options = codec, telemetry, options
        self._model: weakref.ref[nn.Module] | None = None
        self._replaced: torch.optim.Optimizer | None = None

    def _has_hook(self, model: nn.Module) -> bool:
        """Whether the state belongs to this wrapper, and not to an earlier one."""
        return self.state is not None and self._model is not None and self._model() is model

    def _compress(self, model: nn.Module, scaler: Any) -> ExchangeState:
        """Puts the hook on a model that the framework has wrapped.

        Args:
            model: the module that the framework trains.
            scaler: the framework's GradScaler for float16, or None. It finds its scale by steps that overflow, which
                must be skipped, unless the user's options name `scaler` or `nonfinite`.
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
        """Whether `tw.distribute` trains the model, and not a hook that codes gradients."""
        return self._codec is None and not is_sharded(model) and ("design" in self._options or adapts(optimizer))

    def _distribute(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> AutoOptimizer | GroupOptimizer:
        """Returns the replacement of an optimizer, without the framework's wrapper."""
        metrics = () if self._telemetry is None else (JsonLines(self._telemetry),)
        made = distribute(model, optimizer, metrics=metrics, **self._options)
        assert isinstance(made, AutoOptimizer | GroupOptimizer)
        self.optimizer, self._replaced = made, optimizer
        return made

    def _end_distribution(self) -> torch.optim.Optimizer | None:
        """Gives all ranks the same weights, and returns the framework's optimizer; None if it was not replaced."""
        if self.optimizer is None or self.optimizer.closed:
            return None
        self.optimizer.flush()
        self.optimizer.close()
        return self._replaced
