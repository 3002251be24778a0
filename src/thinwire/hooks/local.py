"""The optimizer that a worker runs by itself, where the server sends average gradients or weights and no deltas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from thinwire.hooks.slot import Slot
from thinwire.optimizers.options import apply_changes
from thinwire.optimizers.runner import OptimizerRunner, Settings
from thinwire.schema import Plan
from thinwire.worker.core import Update


class LocalOptimizer:
    """A stock torch optimizer over the slots' values, in the order of the slots: the one that a server would run.

    Args:
        plan: of any shard; it names the optimizer and its options.
        slots: all that are trained.
    """

    def __init__(self, plan: Plan, slots: Sequence[Slot]) -> None:
        self._plan = plan
        self._values = {id(slot): slot.home for slot in slots}
        self._runner = OptimizerRunner(plan.optimizer, plan.groups, [(slot.spec.group, slot.home) for slot in slots])

    def step(self, slot: Slot, gradient: torch.Tensor, update: Update) -> None:
        """One step of one slot, by the settings that came with its update; every other slot stays as it is."""
        groups = apply_changes(self._plan.optimizer, self._plan.groups, update.options) if update.options else None
        self._runner.set(Settings(update.rates, groups or self._plan.groups))
        self._runner.step([self._values[id(slot)]], [gradient])

    def step_all(self, gradients: Iterable[tuple[Slot, torch.Tensor]], settings: Settings) -> None:
        """One step of every slot that has a gradient, each in its table's shape."""
        pairs = [(self._values[id(slot)], gradient) for slot, gradient in gradients]
        self._runner.set(settings)
        self._runner.step([value for value, _ in pairs], [_like(gradient, value) for value, gradient in pairs])

    def state_dict(self) -> dict[str, Any]:
        """Torch's own: momenta and step counts by position."""
        return self._runner.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self._runner.optimizer.load_state_dict(state)


def _like(gradient: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return gradient.detach().to(device=value.device, dtype=value.dtype)
