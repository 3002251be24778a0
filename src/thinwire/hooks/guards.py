"""What a script may do after wrapping that ruins a compressed training, seen at the optimizer's steps.

torch calls global hooks around every step of every optimizer. There the optimizer's class is known, and so are the
parameters that it holds. A gradient that was exchanged and that no optimizer took is found when the next exchange
begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from thinwire.cautions import caution
from thinwire.errors import ConfigError
from thinwire.policies.adaptive import few_bits_warning, is_adaptive

Place: TypeAlias = "tuple[weakref.ref[Any], str]"
"""The place of a parameter; even a weak reference to the parameter would keep `model.to(…)` from replacing it."""


_watching: dict[int, StepGuard] = {}
"""By id. Entries go at any moment, as wrappers become garbage: go over a copy."""


@cache
def _watch() -> None:
    """Has torch call all guards at every step, for good: a guard that left torch's list might do so while it calls."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for guard in tuple(_watching.values()):
        guard.before_step(optimizer)


def _after_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for guard in tuple(_watching.values()):
        guard.after_step(optimizer)


class Gradients:
    """The gradients of the compressed parameters: which of them a script has zeroed since the exchange before.

    Args:
        places: of the parameters, by name.
    """

    def __init__(self, places: Mapping[str, Place]) -> None:
        self.places = places

    def follow(self) -> None:
        """Says that from the next backward pass on each parameter is asked for by itself."""

    def emptied(self, names: Collection[str]) -> set[str]:
        """Returns those of these parameters whose gradients were zeroed before the backward pass under way."""
        return {name for name in names if is_zeroed(parameter_at(self.places[name]))}

    def unaveraged(self) -> set[str]:
        """Returns those to which a backward pass has added since the last exchange, as far as that is looked at."""
        return set()


class Untaken(NamedTuple):
    """Compressed parameters whose gradients, as the exchange before left them, no optimizer has taken.

    Args:
        discarded: were zeroed, after or in a step of another optimizer or of their own.
        kept: are still there, and this exchange's are added to them.
        seen: whether there were any when an optimizer stepped.
    """

    discarded: Collection[str] = ()
    kept: Collection[str] = ()
    seen: bool = False


def places_of(model: nn.Module) -> dict[str, Place]:
    """Returns where a model has its parameters, by name."""
    found = {id(each): (weakref.ref(m), n) for m in model.modules() for n, each in m.named_parameters(recurse=False)}
    return {name: found[id(parameter)] for name, parameter in model.named_parameters()}


class StepGuard:
    """Looks at every optimizer of a model's parameters when it steps. It keeps nothing alive.

    Args:
        wrapper: the module that averages gradients; the watch ends with it, as another may train the model later.
        gradients: those that are compressed.
        reduced: all parameters whose gradients are averaged over the ranks.
        left_out: parameters that were frozen when they were to be averaged, by name.
        few_bits: the codec, where it is fixed and takes fewer than 8 bits a value; the guard warns of an adaptive
            optimizer with it.

    Attributes:
        optimizer: the kind that takes the gradients: 0 unknown yet, 1 SGD, 2 an adaptive one, be it one of several.
    """

    def __init__(
        self,
        wrapper: nn.Module,
        *,
        gradients: Gradients,
        reduced: Collection[Place] = (),
        left_out: Mapping[str, Place] | None = None,
        few_bits: str = "",
    ) -> None:
        self._compressed, self._gradients = gradients.places, gradients
        self._reduced, self._left_out = reduced, dict(left_out or {})
        self._held: WeakKeyDictionary[torch.optim.Optimizer, tuple[int, frozenset[str]]] = WeakKeyDictionary()
        self.optimizer, self._few_bits = 0, few_bits
        # Exchanged and not taken; those of them that were so when an optimizer stepped.
        self._untaken, self._passed = set[str](), set[str]()
        self._told = self._told_unaveraged = False
        self._skipped = 0
        _watch()
        _watching[id(self)] = self
        weakref.finalize(wrapper, self.close).atexit = False

    def close(self) -> None:
        """Ends the watch."""
        _watching.pop(id(self), None)

    def begin_exchange(self, *, skipped: int) -> Untaken:
        """Returns the gradients of the exchange before that no optimizer took; warns once where all were discarded.

        Scripts without an optimizer of torch's are not judged, as their use of gradients is unknown. The gradients of a
        pass may also have been added up by the script, where no optimizer has stepped since: that is warned of alone.

        Args:
            skipped: steps skipped so far: gradients of a skipped step are for no optimizer.
        """
        if skipped != self._skipped or not self._untaken:
            self.forget()
            self._skipped = skipped
            return Untaken()
        emptied = self._gradients.emptied(self._untaken)
        untaken = Untaken(emptied & self._passed, self._untaken - emptied, bool(self._passed))
        if emptied == self._untaken and not self._passed and self.optimizer and not self._told:
            self._told = True
            caution(
                "a backward pass has exchanged gradients that no optimizer took before they were zeroed. The exchange "
                "has spent a part of the residuals on them and left a part of them in the residuals, which later steps "
                "apply: the training may diverge. Keep such a pass out of the exchange, as by `with model.no_sync():` "
                "(DDP), model.set_requires_gradient_sync(False) (FSDP2), or requires_grad_(False) around it. A script "
                "that has added them up by itself, or put others in their place, loses nothing, and may filter this "
                "warning; docs/ddp.md, Gradients that nobody takes"
            )
        self.forget()
        return untaken

    def exchanged(self) -> None:
        """Says that the step under way is compressed, once `begin_exchange` was asked."""
        self._untaken = set(self._compressed)

    def forget(self) -> None:
        """Says that no optimizer was to take the step before: a scaler has skipped it, or residuals were replaced."""
        self._untaken, self._passed = set(), set()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Looks at an optimizer that is about to step.

        Raises:
            ConfigError: it cannot work with compressed gradients.
        """
        held = self._holds(optimizer)
        if isinstance(optimizer, torch.optim.LBFGS) and held:
            raise ConfigError(
                "LBFGS takes several gradients a step and derives the curvature from their differences; compressed "
                "gradients hold what earlier ones left over, and it goes astray. Take another optimizer, such as SGD "
                "or AdamW, or train without compression"
            )
        if held and self._untaken:  # also its own, until the step has ended: a closure may compute them anew
            self._passed |= self._untaken
            if len(held) < len(self._compressed):
                self._gradients.follow()
            if not self._told_unaveraged and self._untaken & held & self._gradients.unaveraged():
                self._told_unaveraged = True
                caution(
                    "a backward pass has added gradients of this rank alone to averaged ones, as "
                    "DistributedDataParallel averages one backward pass for each forward pass: replicas will differ, "
                    "unless every rank has added the same. Where several passes go over one graph, add the losses up "
                    "and call backward() once"
                )
        if self._left_out:
            self._warn_of_unfrozen(optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes off an optimizer's parameters once it has stepped."""
        if self._untaken:
            held = self._holds(optimizer)
            self._untaken, self._passed = self._untaken - held, self._passed - held

    def _holds(self, optimizer: torch.optim.Optimizer) -> frozenset[str]:
        """Returns the names of the compressed parameters of an optimizer; one that is new is looked at."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known, held = self._held.get(optimizer, (-1, frozenset[str]()))
        if known == count:
            return held
        ids = _ids(optimizer)
        held = frozenset(name for name, place in self._compressed.items() if id(parameter_at(place)) in ids)
        self._held[optimizer] = count, held
        if held:
            self.optimizer = max(self.optimizer, 2 if is_adaptive(optimizer) else 1)
        if held and self.optimizer == 2 and self._few_bits:
            codec, self._few_bits = self._few_bits, ""
            caution(few_bits_warning(type(optimizer).__name__, codec))
        return held

    def _warn_of_unfrozen(self, optimizer: torch.optim.Optimizer) -> None:
        found = {
            name: p for name, at in self._left_out.items() if (p := parameter_at(at)) is not None and p.grad is not None
        }
        if found:  # of modules that several wrappers share, each parameter is for one of them to average
            others = {
                id(parameter_at(at))
                for guard in tuple(_watching.values())
                if guard is not self
                for at in guard._reduced
            }
            found = {name: parameter for name, parameter in found.items() if id(parameter) not in others}
        if found and not _ids(optimizer).isdisjoint(map(id, found.values())):
            names = ", ".join([*found][:4]) + (", …" if len(found) > 4 else "")
            self._left_out = {}
            caution(
                f"{len(found)} parameters were frozen when DistributedDataParallel wrapped the model and are trained "
                f"now ({names}): no rank sees another's gradients of them, and the replicas will differ. Unfreeze "
                "them before wrapping, or wrap and compress the model anew"
            )


def _ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def parameter_at(place: Place) -> torch.Tensor | None:
    """Returns the parameter that is there now."""
    holder, name = place
    found: torch.Tensor | None = getattr(holder(), name, None)
    return found


def is_zeroed(parameter: torch.Tensor | None) -> bool:
    """Returns whether a parameter has no gradient, or one of zeros."""
    gradient = None if parameter is None else parameter.grad
    return gradient is None or not getattr(gradient, "_local_tensor", gradient).any()
