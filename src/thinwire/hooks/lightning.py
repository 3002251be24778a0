"""Lightning: `Trainer(strategy="ddp", callbacks=[ThinwireCallback()])`, or `ModelParallelStrategy`.

Lightning wraps the model when `fit` begins, and then calls `on_fit_start`, before the first step. The strategy's
`ddp_comm_hook` cannot be used: Lightning registers it only on GPUs, and needs its state before it wraps the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from thinwire.codecs import Codec
from thinwire.hooks import ddp
from thinwire.hooks.framework_models import WrappedModel
from thinwire.hooks.wrapping import is_distributed, is_sharded

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ModuleNotFoundError(
        "thinwire.hooks.lightning needs Lightning: pip install lightning", name="lightning"
    ) from error


class ThinwireCallback(WrappedModel, Callback):
    """Compresses the gradients of a Lightning training with `strategy="ddp"`. Residuals are in its checkpoints.

    It also supports `ModelParallelStrategy` if the module's `configure_model` calls `fully_shard`.

    Args:
        codec: of `WrappedModel`, which describes `state` and `optimizer`, too.
        telemetry: of `WrappedModel`.
        **options: of `WrappedModel`.

    Example::

        callback = ThinwireCallback()
        Trainer(strategy="ddp", devices=4, callbacks=[callback]).fit(model, data)
    """

    def __init__(
        self, codec: str | Codec | None = None, *, telemetry: str | Path | None = None, **options: Any
    ) -> None:
        super().__init__(codec, telemetry, options)
        self._saved: Mapping[str, Any] | None = None
        self._fits = False
        self._left: tuple[weakref.ref[LightningModule] | None, dict[str, Any] | None] = None, None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Resets after an interrupted fit; residuals of a checkpoint are for the next fit."""
        self._fits = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the hook on the model that the strategy has wrapped, and loads a checkpoint's residuals."""
        wrapped: nn.Module = trainer.strategy.model
        if not is_distributed(wrapped, trainer.world_size):
            return
        if self._replaces_optimizer(trainer):
            return
        self._fits = True
        if is_sharded(wrapped) and self._has_hook(wrapped):
            return  # FSDP2's hooks stay with the model
        state = self._compress(wrapped, getattr(trainer.precision_plugin, "scaler", None))
        saved, self._saved = self._saved, None  # once: a later fit continues from this one's residuals
        module, left = self._left
        if saved is not None:
            ddp.AllRanks(state).load_state_dict(saved)
        elif left is not None and module is not None and module() is pl_module:
            state.load_state_dict(left)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replaces an adaptive optimizer, which has loaded its state of a checkpoint by now."""
        if self._replaces_optimizer(trainer):
            [inner] = trainer.strategy.optimizers
            trainer.strategy.optimizers = [self._distribute(trainer.strategy.model, inner)]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gives all ranks the same weights, and restores the user's optimizer."""
        if (inner := self._end_distribution()) is not None:
            trainer.strategy.optimizers = [inner]

    def _replaces_optimizer(self, trainer: Trainer) -> bool:
        """Whether `tw.distribute` replaces the model's only optimizer, so that no hook codes gradients."""
        if self._codec is not None or trainer.world_size == 1 or len(trainer.strategy.optimizers) != 1:
            return False
        return self._distributes(trainer.strategy.model, trainer.strategy.optimizers[0])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Records the loss, if there is a telemetry file."""
        every = trainer.log_every_n_steps
        due = self._telemetry is not None and every > 0 and (batch_idx + 1) % every == 0
        if due and self.state is not None and isinstance(outputs, Mapping) and "loss" in outputs:
            self.state.record_scores(loss=outputs["loss"])

    def state_dict(self) -> dict[str, Any]:
        """Returns the residuals of all ranks on rank 0, which writes them; Lightning calls it on every rank."""
        return {} if self.state is None else ddp.AllRanks(self.state).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps a checkpoint's residuals until the model is wrapped; loads them at once for a sharded model."""
        if self.state is not None and self._fits and state_dict:
            ddp.AllRanks(self.state).load_state_dict(state_dict)
        else:
            self._saved = state_dict or None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ends the hook's threads with the training."""
        self._fits = False
        if stage != "fit" or self.state is None:
            return
        if is_sharded(trainer.strategy.model or pl_module):
            self.state.between_steps()  # records the last step, if it was measured
        else:
            if self.state.driver.failure is None:
                self._left = weakref.ref(pl_module), self.state.state_dict()
            self.state.close()
