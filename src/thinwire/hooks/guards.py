"""Detects, at optimizer steps, script errors after wrapping that ruin a compressed training.

torch calls global hooks around every step of every optimizer. They see the optimizer's class and its parameters. A
gradient that was exchanged and that no optimizer used is detected when the next exchange begins.
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
"""Guards by id. Iterate over a copy: entries disappear at any moment, when wrappers are garbage-collected."""


@cache
def _watch() -> None:
    """Registers torch hooks that call all guards, and are never removed: torch may be iterating over them."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for guard in tuple(_watching.values()):
        guard.before_step(optimizer)


def _after_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for guard in tuple(_watching.values()):
        guard.after_step(optimizer)


class Gradients:
    """The gradients of the compressed parameters, some of which a script may zero between exchanges.

    Args:
        places: of the parameters, by name.
    """

    def __init__(self, places: Mapping[str, Place]) -> None:
        self.places = places

    def follow(self) -> None:
        """Makes `emptied` exact for each parameter, from the next backward pass on."""

    def emptied(self, names: Collection[str]) -> set[str]:
        """Returns the names of parameters with gradients that were zeroed before the backward pass under way."""
        return {name for name in names if is_zeroed(parameter_at(self.places[name]))}

    def unaveraged(self) -> set[str]:
        """Returns those to which a backward pass has added since the last exchange, as far as hooks follow them."""
        return set()


class UnusedGradients(NamedTuple):
    """Compressed parameters with gradients of the previous exchange that no optimizer used.

    Args:
        discarded: parameters with gradients that were zeroed after or in an optimizer's step.
        kept: parameters that still have their gradients, to which this exchange adds.
        seen: whether there were any when an optimizer stepped.
    """

    discarded: Collection[str] = ()
    kept: Collection[str] = ()
    seen: bool = False


def places_of(model: nn.Module) -> dict[str, Place]:
    """Returns the places of a model's parameters, by name."""
    found = {id(each): (weakref.ref(m), n) for m in model.modules() for n, each in m.named_parameters(recurse=False)}
    return {name: found[id(parameter)] for name, parameter in model.named_parameters()}


class StepGuard:
    """Checks every optimizer of a model's parameters when it steps. It keeps neither model nor optimizer alive.

    Args:
        wrapper: the module that averages gradients; the guard ends with it, as another may train the model later.
        gradients: of the compressed parameters.
        reduced: all parameters with gradients that are averaged over the ranks.
        left_out: parameters that were frozen at wrapping and are not averaged, by name.
        few_bits: the codec, if it is fixed and needs fewer than 8 bits a value; the guard warns of an adaptive
            optimizer with it.

    Attributes:
        optimizer: the kind that uses the gradients: 0 unknown yet, 1 SGD, 2 adaptive, also as one of several.
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
        # Exchanged and not used; those of them that were unused when an optimizer stepped.
        self._unused, self._unused_at_step = set[str](), set[str]()
        self._warned = self._warned_of_unaveraged = False
        self._skipped = 0
        _watch()
        _watching[id(self)] = self
        weakref.finalize(wrapper, self.close).atexit = False

    def close(self) -> None:
        """Removes the guard."""
        _watching.pop(id(self), None)

    def begin_exchange(self, *, skipped: int) -> UnusedGradients:
        """Returns the previous exchange's gradients that no optimizer used; warns once if all were discarded.

        Scripts without a torch optimizer are not checked, because their use of gradients is unknown. If no optimizer
        has stepped since, the script may have added up the gradients itself: this causes only the warning.

        Args:
            skipped: steps skipped so far: no optimizer uses gradients of a skipped step.
        """
        if skipped != self._skipped or not self._unused:
            self.forget()
            self._skipped = skipped
            return UnusedGradients()
        emptied = self._gradients.emptied(self._unused)
        unused = UnusedGradients(emptied & self._unused_at_step, self._unused - emptied, bool(self._unused_at_step))
        if emptied == self._unused and not self._unused_at_step and self.optimizer and not self._warned:
            self._warned = True
            caution(
                "a backward pass has exchanged gradients that no optimizer took before they were zeroed. The exchange "
                "has spent a part of the residuals on them and left a part of them in the residuals, which later steps "
                "apply: the training may diverge. Keep such a pass out of the exchange, as by `with model.no_sync():` "
                "(DDP), model.set_requires_gradient_sync(False) (FSDP2), or requires_grad_(False) around it. A script "
                "that has added them up by itself, or replaced them, loses nothing, and may filter this warning: see "
                "docs/ddp.md"
            )
        self.forget()
        return unused

    def exchanged(self) -> None:
        """Records that the step under way is compressed, after `begin_exchange`."""
        self._unused = set(self._compressed)

    def forget(self) -> None:
        """Forgets the previous step's gradients: a scaler has skipped it, or residuals were replaced."""
        self._unused, self._unused_at_step = set(), set()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Checks an optimizer that is about to step.

        Raises:
            ConfigError: the optimizer cannot work with compressed gradients.
        """
        held = self._holds(optimizer)
        if isinstance(optimizer, torch.optim.LBFGS) and held:
            raise ConfigError(
                "LBFGS computes several gradients a step and derives the curvature from their differences, which the "
                "residuals in compressed gradients distort. Use another optimizer, such as SGD or AdamW, or train "
                "without compression"
            )
        if held and self._unused:  # its own count until the step ends: a closure may compute them anew
            self._unused_at_step |= self._unused
            if len(held) < len(self._compressed):
                self._gradients.follow()
            if not self._warned_of_unaveraged and self._unused & held & self._gradients.unaveraged():
                self._warned_of_unaveraged = True
                caution(
                    "a backward pass has added gradients of this rank alone to averaged ones, as "
                    "DistributedDataParallel averages one backward pass for each forward pass: replicas will differ, "
                    "unless every rank has added the same. Where several passes go over one graph, add the losses up "
                    "and call backward() once"
                )
        if self._left_out:
            self._warn_of_unfrozen(optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Marks an optimizer's gradients as used."""
        if self._unused:
            held = self._holds(optimizer)
            self._unused, self._unused_at_step = self._unused - held, self._unused_at_step - held

    def _holds(self, optimizer: torch.optim.Optimizer) -> frozenset[str]:
        """Returns the names of an optimizer's compressed parameters; checks an optimizer that is new."""
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
        if found:  # another wrapper of the same module may average these
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
    """Returns the parameter that is at a place now."""
    holder, name = place
    found: torch.Tensor | None = getattr(holder(), name, None)
    return found


def is_zeroed(parameter: torch.Tensor | None) -> bool:
    """Returns whether a parameter has no gradient, or only zeros."""
    gradient = None if parameter is None else parameter.grad
    return gradient is None or not getattr(gradient, "_local_tensor", gradient).any()
