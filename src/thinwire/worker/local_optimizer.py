"""The optimizer that a worker runs itself, where shards send average gradients or weights and no deltas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from thinwire.optimizers.options import apply_changes
from thinwire.optimizers.runner import OptimizerRunner, Settings
from thinwire.schema import Plan
from thinwire.worker.conversation import Update
from thinwire.worker.table import WorkerTable


class LocalOptimizer:
    """The plan's optimizer over a worker's tables, in the order of the model.

    Args:
        plan: of any shard; it names the optimizer and its options.
        tables: all that are trained.
    """

    def __init__(self, plan: Plan, tables: Sequence[WorkerTable]) -> None:
        self._plan = plan
        self._runner = OptimizerRunner(plan.optimizer, plan.groups, [(t.spec.group, t.values) for t in tables])

    def step(self, table: WorkerTable, gradient: torch.Tensor, update: Update) -> None:
        """Updates one table by the rates and options that came with the average gradient; others stay as they are."""
        plan = self._plan
        groups = apply_changes(plan.optimizer, plan.groups, update.options) if update.options else plan.groups
        self._runner.set(Settings(update.rates, groups))
        self._runner.step([table.values], [gradient])

    def step_all(self, gradients: Iterable[tuple[WorkerTable, torch.Tensor]], settings: Settings) -> None:
        """Updates every table by its own gradient, which is in the table's shape."""
        values, grads = [], []
        for table, gradient in gradients:
            values.append(table.values)
            grads.append(gradient.detach().to(device=table.values.device, dtype=table.values.dtype))
        self._runner.set(settings)
        self._runner.step(values, grads)

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's state: momenta and step counts by position."""
        return self._runner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self._runner.load_state_dict(state)
