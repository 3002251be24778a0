"""The model at a worker: every tensor's copy, and what happens to the copies without asking a shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import xxhash

from thinwire.codecs.registry import codec as make_codec
from thinwire.errors import ConfigError
from thinwire.optimizers.options import apply_changes
from thinwire.optimizers.runner import OptimizerRunner, Settings
from thinwire.policies.designs import Design
from thinwire.schema import Plan
from thinwire.telemetry import Counters
from thinwire.worker.averaging import WeightAverage
from thinwire.worker.conversation import Update
from thinwire.worker.table import LocalStep, WorkerTable
from thinwire.worker.tensor import PlannedTensor, WorkerTensor

PLAIN = make_codec("fp32")


class WorkerModel:
    """A model's tensors at one worker.

    Args:
        plans: one for each shard.
        planned: the model's tensors.
        design: what is sent, both ways.
        counters: for bytes and seconds.
        now: returns a time in seconds.
        seed: of random codecs.
        revocable: whether a push may have no effect.
        measures: whether steps are recorded.

    Attributes:
        tensors: parameters and buffers, in the model's order.
        evaluating: whether the model has its averaged weights for now.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        planned: Sequence[PlannedTensor],
        design: Design,
        counters: Counters,
        now: Callable[[], float],
        *,
        seed: int,
        revocable: bool,
        measures: bool,
    ) -> None:
        self.tensors: list[WorkerTensor] = []
        self.evaluating = False
        self._design = design
        for each in planned:
            tensor = WorkerTensor(each)
            for partition, index in each.placed:
                spec = plans[partition.server].tables[index]
                table = WorkerTable(
                    partition,
                    index,
                    spec,
                    tensor.values[partition.start : partition.stop].view(spec.shape),
                    None if each.state else each.up,
                    counters,
                    now,
                    seed=seed,
                    revocable=revocable,
                    measures=measures and not each.state,
                )
                tensor.tables.append(table)
            self.tensors.append(tensor)
        self._plan = plans[0]
        self._optimizer: OptimizerRunner | None = None
        if design.downlink != "delta":  # then shards do not run it
            tables = [(table.spec.group, table.values) for table in self.trained_tables()]
            self._optimizer = OptimizerRunner(self._plan.optimizer, self._plan.groups, tables)
        self._average = WeightAverage(self.tensors, design.ema) if design.ema else None

    @property
    def local_step(self) -> LocalStep | None:
        """Applies an average gradient, where that is what shards send; None where they send what is added or stored."""
        return self._step_by if self._design.downlink == "gradient" else None

    def _step_by(self, table: WorkerTable, gradient: torch.Tensor, update: Update) -> None:
        """Updates one table by the rates and options that came with the average gradient."""
        assert self._optimizer is not None
        groups = self._plan.groups
        if update.options:
            self._optimizer.set(Settings(update.rates, apply_changes(self._plan.optimizer, groups, update.options)))
        else:
            self._optimizer.set(Settings(update.rates, groups))
        self._optimizer.step([table.values], [gradient])

    def trained_tables(self) -> Iterator[WorkerTable]:
        """The tables of all parameters, in the model's order."""
        for tensor in self.tensors:
            if not tensor.state:
                yield from tensor.tables

    def gradients(self) -> Iterator[tuple[WorkerTable, torch.Tensor]]:
        """Every table that has a gradient, with it."""
        for tensor in self.tensors:
            yield from tensor.gradients()

    def gradients_are_finite(self) -> bool:
        """Whether no gradient of this step holds NaN or Inf."""
        return all(bool(torch.isfinite(gradient).all()) for _, gradient in self.gradients())

    def accumulate_gradients(self) -> None:
        """Adds this step's gradients to the next push."""
        for table, gradient in self.gradients():
            table.accumulate(gradient)

    def step_locally(self, settings: Settings, step: int) -> None:
        """Runs the worker's own optimizer on its own gradients."""
        assert self._optimizer is not None
        values, grads = [], []
        for table, gradient in self.gradients():
            values.append(table.values)
            grads.append(gradient.detach().to(device=table.values.device, dtype=table.values.dtype))
            table.observe(gradient)
            table.note_change(step)
        self._optimizer.set(settings)
        self._optimizer.step(values, grads)
        for tensor in self.tensors:
            tensor.write()

    def initial_frames(self, shard: int) -> tuple[bytes, ...]:
        """The uncompressed values of a shard's tables, in the order of its plan."""
        tables = [table for tensor in self.tensors for table in tensor.tables if table.shard == shard]
        return tuple(PLAIN.encode(table.array) for table in sorted(tables, key=lambda table: table.index))

    def digest(self) -> str:
        """A hash of every parameter's copy."""
        digest = xxhash.xxh3_64()
        for table in self.trained_tables():
            digest.update(table.array.data)
        return digest.hexdigest()

    # ---- averaged weights

    def update_average(self) -> None:
        """Adds the weights as they are now to their moving average, where the design has one."""
        if self._average is not None:
            self._average.update()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Inside the block the model has the averaged weights.

        Raises:
            ConfigError: the design averages none.
        """
        if self._average is None:
            raise ConfigError(
                f"design {self._design.name!r} averages no weights; ask for it by `ema`, as in 'terngrad[ema=0.9999]'"
            )
        self.evaluating = True
        try:
            with self._average.in_place():
                yield
        finally:
            self.evaluating = False

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Returns residuals, accumulated gradients and random streams by table, the own optimizer's state, averages."""
        state: dict[str, Any] = {"contexts": {table.spec.name: table.state_dict() for table in self.trained_tables()}}
        if self._optimizer is not None:
            state["optimizer"] = self._optimizer.state_dict()
        if self._average is not None:
            state["averages"] = self._average.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned.

        Raises:
            ConfigError: a table of this model is missing in the state; nothing was changed.
        """
        contexts, tables = state["contexts"], list(self.trained_tables())
        for table in tables:
            if table.spec.name not in contexts:
                raise ConfigError(f"the state has no residual for {table.spec.name!r}; it has {sorted(contexts)[:8]} …")
        for table in tables:
            table.load_state_dict(contexts[table.spec.name])
        if self._optimizer is not None and "optimizer" in state:
            self._optimizer.load_state_dict(state["optimizer"])
        if self._average is not None and "averages" in state:
            self._average.load_state_dict(state["averages"])
