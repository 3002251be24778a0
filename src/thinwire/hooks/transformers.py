"""Hugging Face's Trainer: `trainer.add_callback(ThinwireCallback(trainer))`, or `(trainer, "3lc", sparsity=1.0)`.

The Trainer wraps the model when `train()` begins, and calls `on_train_begin` afterwards. Callbacks receive the model
without its wrapper, so this one reads the Trainer's `model_wrapped`.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from thinwire.cautions import caution
from thinwire.codecs import Codec
from thinwire.hooks import ddp
from thinwire.hooks.exchange.state import ExchangeState
from thinwire.hooks.framework_models import WrappedModel
from thinwire.hooks.wrapping import is_distributed
from thinwire.runtime.digests import bits_digest
from thinwire.runtime.peers import from_first, gather

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ModuleNotFoundError(
        "thinwire.hooks.transformers needs transformers and accelerate: pip install transformers accelerate",
        name="transformers",
    ) from error

FILE = "thinwire.pt"
"""The file in every checkpoint's folder with the residuals of all ranks."""
WEIGHTS = "weights"
"""The key in that file of the digest of the residuals' weights."""


class ThinwireCallback(WrappedModel, TrainerCallback):
    """Compresses the gradients of a Trainer on several ranks, by DDP or FSDP2. Residuals are in its checkpoints.

    Args:
        trainer: receives the callback.
        codec: of `WrappedModel`, which describes `state` and `optimizer`, too.
        telemetry: of `WrappedModel`.
        **options: of `WrappedModel`.

    Example::

        trainer = Trainer(model, TrainingArguments(…), train_dataset=data)
        trainer.add_callback(ThinwireCallback(trainer))
        trainer.train()
    """

    def __init__(
        self,
        trainer: Trainer,
        codec: str | Codec | None = None,
        *,
        telemetry: str | Path | None = None,
        **options: Any,
    ) -> None:
        super().__init__(codec, telemetry, options)
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Puts the hook on the wrapped model, and loads the residuals of the checkpoint that the Trainer resumed."""
        if not is_distributed(self._trainer.model_wrapped, args.world_size):
            return
        wrapped = self._trainer.model_wrapped
        if self._codec is None:
            holder: Any = self._trainer.optimizer
            inner = getattr(holder, "optimizer", holder)  # within Accelerate's wrapper
            if self._distributes(wrapped, inner):
                self._set_optimizer(self._distribute(wrapped, inner))
                return
        if not self._has_hook(wrapped):
            if self.state is not None:
                self.state.close()  # of a previous wrapper
            self._compress(wrapped, getattr(self._trainer.accelerator, "scaler", None))
        if state.global_step > 0 and self.state is not None:
            self._load(self.state, args, state)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Records the loss, if there is a telemetry file; the Trainer calls it on every rank."""
        if self.state is not None and logs and "loss" in logs:
            self.state.record_scores(loss=float(logs["loss"]))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Records the last step, if it was measured; a second `train()` uses the same hook, or chooses anew."""
        if (inner := self._end_distribution()) is not None:
            self._set_optimizer(inner)
        if self.state is not None:
            self.state.between_steps()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Writes the residuals of all ranks into the checkpoint's folder; the Trainer calls it on every rank."""
        if self.state is None:
            return
        whole, weights = ddp.AllRanks(self.state).state_dict(), _digest(self._trainer.model)
        if not state.is_world_process_zero:
            return
        folder = self._folder(args, state.global_step)
        if folder.is_dir():
            part = folder / f"{FILE}.part"
            torch.save({**whole, WEIGHTS: weights}, part)
            part.replace(folder / FILE)
        else:
            caution(f"the Trainer's checkpoint is not at {folder}: the residuals of all ranks are not saved")

    def _set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Sets the Trainer's optimizer, inside Accelerate's wrapper if there is one."""
        holder = self._trainer.optimizer
        if hasattr(holder, "optimizer"):
            holder.optimizer = optimizer
        else:
            self._trainer.optimizer = optimizer

    def _load(self, state: ExchangeState, args: TrainingArguments, trained: TrainerState) -> None:
        """Loads the residuals that rank 0 finds, on all ranks or on none: machines may have separate disks."""
        step, given = trained.global_step, args.resume_from_checkpoint
        folders = [*([Path(given)] if isinstance(given, str) else []), self._folder(args, step)]
        kept = self._read(folders)
        lacking = [rank for rank, has in enumerate(gather(state.everyone, bytes([kept is not None]))) if has == b"\0"]
        if 0 not in lacking:
            if lacking:
                sent = io.BytesIO()
                if state.rank == 0:
                    torch.save(kept, sent)
                data = from_first(state.everyone, sent.getvalue())
                kept = kept or torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
            assert kept is not None
            ddp.AllRanks(state).load_state_dict(kept)
            return
        caution(
            f"the Trainer resumes at step {step}, and {folders[0] / FILE} is not there on rank 0, or is damaged, "
            "or of other weights: residuals begin at zero. For a checkpoint in another place give "
            "TrainingArguments(resume_from_checkpoint=FOLDER)"
        )

    def _folder(self, args: TrainingArguments, step: int) -> Path:
        """Returns the folder of a step's checkpoint; in a hyperparameter search each trial has a separate folder."""
        place = getattr(self._trainer, "_get_output_dir", None)
        trial = getattr(self._trainer, "_trial", None)
        return Path(args.output_dir if place is None else place(trial=trial)) / f"checkpoint-{step}"

    def _read(self, folders: Sequence[Path]) -> dict[str, Any] | None:
        """Returns the residuals that belong to this rank's weights; None if no file has them."""
        own = _digest(self._trainer.model)
        for file in (folder / FILE for folder in folders):
            if file.exists():
                try:
                    kept: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu")
                    if kept.pop(WEIGHTS, own) == own:
                        return kept
                except Exception as error:  # of torch or pickle; this rank must not fail alone: the others wait
                    caution(f"{file} cannot be read: {error}")
        return None


def _digest(model: torch.nn.Module) -> str:
    """Returns a digest of the trained weights, which the residuals belong to: a folder may be of another run or step.

    All ranks call it together, because with FSDP2 each has a part of every parameter.
    """
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    return bits_digest(each.full_tensor() if isinstance(each, DTensor) else each for each in trained)
