"""What a script may do after wrapping that ruins a compressed training: told of before the optimizer's step.

torch calls a global hook before every step of every optimizer; there the optimizer's class is known, and so are the
gradients that it is about to apply. Of every compressed step it is told, and tells of one that no optimizer has taken.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from thinwire.cautions import caution
from thinwire.errors import ConfigError
from thinwire.policies.adaptive import few_bits_warning, is_adaptive

Place: TypeAlias = "tuple[weakref.ref[nn.Module], str]"
"""Of a parameter: a reference to itself, even a weak one, would keep `model.to(…)` from replacing it."""


_watching: dict[int, StepGuard] = {}
"""By id. Entries go at any moment, as wrappers become garbage: go over a copy."""


@cache
def _watch() -> None:
    """Has torch call all guards before every step, for good: whoever left torch's list might do so while it calls."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for guard in tuple(_watching.values()):
        guard.before_step(optimizer)


class StepGuard:
    """Looks at every optimizer of a model's parameters before it steps. It keeps nothing alive.

    Args:
        model: the wrapped model.
        wrapper: what averages its gradients; the watch ends with it, as the model may go on in another.
        reduced: the parameters whose gradients are averaged over the ranks.
        compressed: those of them whose gradients are compressed.
        ignored: names of parameters that the script leaves to each rank on purpose.
        few_bits: the codec, where it is fixed and takes fewer than 8 bits a value: with an adaptive optimizer that is
            warned of.

    Attributes:
        optimizer: what takes the gradients: 0 unknown yet, 1 SGD, 2 an adaptive optimizer, be it one of several.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        wrapper: nn.Module,
        reduced: Collection[torch.Tensor],
        compressed: Collection[torch.Tensor],
        ignored: Collection[str] = (),
        few_bits: str = "",
    ) -> None:
        ours, coded = ({id(parameter) for parameter in each} for each in (reduced, compressed))
        places = {
            id(each): (weakref.ref(m), n) for m in model.modules() for n, each in m.named_parameters(recurse=False)
        }
        self._compressed: list[Place] = []
        self._reduced: list[Place] = []
        self._left_out: list[tuple[str, Place]] = []
        for name, parameter in model.named_parameters():
            if id(parameter) in coded:
                self._compressed.append(places[id(parameter)])
            if id(parameter) in ours:
                self._reduced.append(places[id(parameter)])
            elif name not in ignored:
                self._left_out.append((name, places[id(parameter)]))
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.optimizer, self._few_bits = 0, few_bits
        self._unused = self._told = False
        self._skipped = 0
        _watch()
        _watching[id(self)] = self
        weakref.finalize(wrapper, self.close).atexit = False

    def close(self) -> None:
        """Ends the watch."""
        _watching.pop(id(self), None)

    def exchanged(self, *, anew: bool, skipped: int) -> None:
        """Takes a compressed step, once its gradients are there; warns once where an earlier one's were thrown away.

        Scripts without an optimizer of torch's are not judged, as nobody sees what they do with gradients.

        Args:
            anew: whether they have replaced those of the compressed step before, and were not added to them.
            skipped: steps skipped before this one: nobody is to take a step of NaN.
        """
        wasted = anew and self._unused and bool(self._optimizers) and skipped == self._skipped
        self._unused, self._skipped = True, skipped
        if wasted and not self._told:
            self._told = True
            caution(
                "a backward pass has exchanged gradients that no optimizer took before they were zeroed. The exchange "
                "has spent a part of the residuals on them and left a part of them in the residuals, which later steps "
                "apply: the training may diverge. Keep such a pass out of the exchange, as by `with model.no_sync():` "
                "(DDP), model.set_requires_gradient_sync(False) (FSDP2), or requires_grad_(False) around it. A script "
                "that has added them up by itself, or put others in their place, loses nothing, and may filter this "
                "warning; docs/ddp.md, Gradients that nobody takes"
            )

    def forget(self) -> None:
        """Says that nobody was to take the step before: a scaler has skipped it, or residuals have been replaced."""
        self._unused = False

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Looks at an optimizer that is about to step.

        Raises:
            ConfigError: it cannot work with compressed gradients.
        """
        if isinstance(optimizer, torch.optim.LBFGS) and self._holds(optimizer, self._compressed):
            raise ConfigError(
                "LBFGS takes several gradients a step and derives the curvature from their differences; compressed "
                "gradients hold what earlier ones left over, and it goes astray. Take another optimizer, such as SGD "
                "or AdamW, or train without compression"
            )
        if optimizer not in self._known:
            self._known.add(optimizer)
            self._look_at(optimizer)
        if self._unused and (optimizer in self._optimizers or self._holds(optimizer, self._compressed)):
            self._optimizers.add(optimizer)
            self._unused = False
        if self._left_out:
            self._warn_of_unfrozen(optimizer)

    def _look_at(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes whether an optimizer of our gradients is adaptive; warns where a fixed codec does not suit it."""
        if not self._holds(optimizer, self._compressed):
            return
        self.optimizer = max(self.optimizer, 2 if is_adaptive(optimizer) else 1)
        if self.optimizer == 2 and self._few_bits:
            codec, self._few_bits = self._few_bits, ""
            caution(few_bits_warning(type(optimizer).__name__, codec))

    def _warn_of_unfrozen(self, optimizer: torch.optim.Optimizer) -> None:
        found = [(name, at) for name, at in self._left_out if (p := _parameter(at)) is not None and p.grad is not None]
        if found:  # of modules that several wrappers share, each parameter is for one of them to average
            others = {
                id(_parameter(at)) for guard in tuple(_watching.values()) if guard is not self for at in guard._reduced
            }
            found = [(name, at) for name, at in found if id(_parameter(at)) not in others]
        if found and self._holds(optimizer, [at for _, at in found]):
            names = ", ".join(name for name, _ in found[:4]) + (", …" if len(found) > 4 else "")
            self._left_out = []
            caution(
                f"{len(found)} parameters were frozen when DistributedDataParallel wrapped the model and are trained "
                f"now ({names}): no rank sees another's gradients of them, and the replicas will differ. Unfreeze "
                "them before wrapping, or wrap and compress the model anew"
            )

    @staticmethod
    def _holds(optimizer: torch.optim.Optimizer, places: Collection[Place]) -> bool:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return any(id(parameter) in held for at in places if (parameter := _parameter(at)) is not None)


def _parameter(place: Place) -> torch.Tensor | None:
    module, name = place
    found: torch.Tensor | None = getattr(module(), name, None)
    return found
