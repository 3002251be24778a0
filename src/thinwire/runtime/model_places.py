"""The places of exchanged tensors in a model, and the training that each tensor belongs to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from thinwire.cautions import caution
from thinwire.errors import ConfigError

_trained: Any = WeakIdKeyDictionary()  # untyped in torch
"""For each parameter, a weak reference to the `ModelPlaces` of its training."""


class Exchanged(Protocol):
    """A tensor of the model that is exchanged."""

    @property
    def name(self) -> str:
        """The tensor's name in the model."""

    @property
    def parameter(self) -> torch.Tensor:
        """The model's parameter or buffer."""

    @property
    def shown(self) -> torch.Tensor:
        """The parameter or buffer, detached when the training began."""


class ModelPlaces:
    """The places of a model's exchanged tensors, from construction until `leave`.

    Args:
        model: has the tensors as parameters and buffers.
        tensors: the exchanged tensors.
        end: ends the training on this worker, for `release`.
    """

    def __init__(self, model: nn.Module, tensors: Sequence[Exchanged], end: Callable[[], None]) -> None:
        self._unexchanged: set[str] = set()
        self._tensors, self._end = tensors, end
        of = {id(tensor.parameter): tensor for tensor in tensors}
        # A module's dict, the name in it, and the tensor.
        self._owners: list[tuple[dict[str, Any], str, Exchanged]] = [
            (owner, name, of[id(found)])
            for module in model.modules()
            for owner in cast("tuple[dict[str, Any], ...]", (module._parameters, module._buffers))
            for name, found in owner.items()
            if id(found) in of
        ]
        self._frozen = [(name, weakref.ref(p)) for name, p in model.named_parameters() if p.numel() and id(p) not in of]
        for tensor in tensors:
            _trained[tensor.parameter] = weakref.ref(self)

    def leave(self) -> None:
        """Frees the tensors for another training."""
        for tensor in self._tensors:
            if (found := _trained.get(tensor.parameter)) is not None and found() is self:
                del _trained[tensor.parameter]

    def check(self) -> None:
        """Checks that the model still has the exchanged parameters; keeps values that were assigned to buffers.

        Raises:
            ConfigError: a parameter was moved or replaced, so updates would not reach the model.
        """
        for owner, key, tensor in self._owners:
            parameter, now = tensor.parameter, owner.get(key)
            if not isinstance(parameter, nn.Parameter):
                if now is not None and self._keep_assigned(tensor, now):
                    owner[key] = parameter
                continue
            if now is not None and now is not parameter:
                raise ConfigError(
                    f"the model has another parameter in place of {tensor.name!r} than when it was given to "
                    "tw.distribute, and neither the optimizer nor the other workers know it. Load weights by "
                    "load_state_dict without assign=True, and change layers before the optimizer is made"
                )
            if parameter.data_ptr() != tensor.shown.data_ptr():
                raise ConfigError(
                    f"{tensor.name!r} was moved after tw.distribute: it is {_place(parameter)} in other memory than "
                    f"the {_place(tensor.shown)} that is exchanged. Call .to(), .half() and the like before "
                    "tw.distribute, and change values in place, as in parameter.data.copy_(values)"
                )
        self._warn_of_unfrozen()

    def _keep_assigned(self, tensor: Exchanged, now: torch.Tensor) -> bool:
        """Copies a tensor that a forward pass assigned (self.mean = …) into the exchanged buffer, if its shape fits."""
        buffer = tensor.parameter
        if now.shape != tensor.shown.shape:
            if now is buffer:  # a module has resized it in place: separate it from the exchanged memory
                buffer.data = buffer.detach().clone()
            if tensor.name not in self._unexchanged:
                self._unexchanged.add(tensor.name)
                caution(
                    f"buffer {tensor.name!r} has another shape and cannot be exchanged, and stays each worker's own "
                    f"from now on: it is {tuple(now.shape)} now, and was {tuple(tensor.shown.shape)}"
                )
            return False
        if now is buffer and buffer.data_ptr() == tensor.shown.data_ptr():
            return True
        with torch.no_grad():
            tensor.shown.copy_(now)
        buffer.data = tensor.shown
        return True

    def _warn_of_unfrozen(self) -> None:
        parameters = ((name, ref()) for name, ref in self._frozen)
        found = [name for name, p in parameters if p is not None and p.requires_grad and p.grad is not None]
        if found:
            self._frozen = []
            names = ", ".join(found[:4]) + (", …" if len(found) > 4 else "")
            caution(
                f"{len(found)} parameters were frozen when the model was given to tw.distribute and have gradients now "
                f"({names}): they are not exchanged, and workers will differ in them. Unfreeze them before "
                "tw.distribute, or end this training and call it anew"
            )


def check_free(model: nn.Module) -> None:
    """Raises ConfigError if another training that has not ended exchanges one of the model's parameters."""
    for name, parameter in model.named_parameters():
        if _training(parameter) is not None:
            raise ConfigError(
                f"this model is being trained by what an earlier tw.distribute returned, which exchanges {name!r}: "
                "call close() on that optimizer, or leave its `with` block, before tw.distribute is called with the "
                "model again"
            )


def release(model: nn.Module) -> None:
    """Ends a model's training that began and could not be joined."""
    for parameter in model.parameters():
        if (found := _training(parameter)) is not None:
            found._end()


def _training(parameter: torch.Tensor) -> ModelPlaces | None:
    found = _trained.get(parameter)
    return None if found is None else found()


def _place(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
