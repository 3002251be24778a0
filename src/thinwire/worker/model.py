"""The model at a worker: every tensor's copy, and what happens to the copies without asking a shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import xxhash

from thinwire.codecs import Codec
from thinwire.errors import ConfigError
from thinwire.optimizers.options import Options, Settings, apply_changes
from thinwire.optimizers.runner import OptimizerRunner
from thinwire.policies.assignment import Partition
from thinwire.policies.compression import PLAIN
from thinwire.policies.designs import Design
from thinwire.schema import Plan
from thinwire.states import check_sizes, read
from thinwire.telemetry import Counters
from thinwire.worker.apply_buffer import Update
from thinwire.worker.finite import all_finite
from thinwire.worker.table import LocalStep, WorkerTable

USED_TOO_EARLY = (
    "{name!r} was used before its last update was applied: its module was not called through the model, or "
    "torch.compile ran what it had compiled before tw.distribute. Call opt.sync() before such a forward pass; of a "
    "compiled model, torch.compiler.reset() once, after tw.distribute"
)
"""Why a gradient is refused: layers ask for updates in hooks, and a graph of before has none."""


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of the model as planned.

    Args:
        name: in the model.
        tensor: the parameter or buffer.
        state: whether it is a buffer.
        up: codec of the pushes.
        placed: its partitions in order, each with the index of its table in the shard's plan.
        local: whether the tensor is changed by the worker's own optimizer, beside the shared copy.
    """

    name: str
    tensor: torch.Tensor
    state: bool
    up: Codec
    placed: tuple[tuple[Partition, int], ...]
    local: bool = False


class WorkerTensor:
    """One tensor of the model at a worker: a float32 copy that updates change, and the tables that are views of it.

    A contiguous float32 tensor is its own copy: deltas are added in place, with no temporary. Any other (half
    precision, channels last) gets a copy beside it, so that small deltas are not rounded away and every worker holds
    the same bits; so does a tensor that local steps change. Either is on the tensor's device: updates of a tensor
    on a GPU are decoded there.

    Args:
        planned: what it is; changed in place, outside autograd.

    Attributes:
        values: float32[n], flat; the tensor's own memory where possible.
        tables: one for each partition, in order.
        sends_some: whether a push holds some of the values, as with `topk`.
        shown: the model's tensor, detached.
    """

    def __init__(self, planned: PlannedTensor) -> None:
        self.name, self.state, self.parameter = planned.name, planned.state, planned.tensor
        self.sends_some = planned.up.scheme.sends_some
        self.tables: list[WorkerTable] = []
        self.shown = planned.tensor.detach()
        own = self.shown.dtype == torch.float32 and planned.tensor.is_contiguous()
        self._separate = planned.local or not own
        self.values = self.local.clone() if self._separate else self.shown.view(-1)

    @property
    def local(self) -> torch.Tensor:
        """The values in the model's tensor now: float32[n], flat; its own memory where possible."""
        return self.shown.to(torch.float32).contiguous().view(-1)

    def read(self) -> None:
        """Takes over the tensor's values, after something else changed them."""
        if self._separate:
            self.values.copy_(self.local)

    def write(self) -> None:
        """Copies the values to the tensor, where it is separate; else tells autograd that they have changed."""
        if self._separate:
            self.shown.copy_(self.values.view(self.shown.shape))
        else:
            torch.autograd.graph.increment_version(self.parameter)

    def gradients(self) -> Iterator[tuple[WorkerTable, torch.Tensor]]:
        """Each table with its part of the gradient; nothing for a buffer, or without a gradient."""
        if not self.state and self.parameter.grad is not None:
            for table in self.tables:
                yield table, table.part_of(self.parameter.grad)


class SavedModel(msgspec.Struct, frozen=True):
    """The result of a model's `state_dict`."""

    contexts: dict[str, dict[str, Any]]
    optimizer: dict[str, Any] | None = None
    averages: dict[str, torch.Tensor] = {}


class WorkerModel:
    """A model's tensors at one worker.

    Args:
        plans: one for each shard.
        planned: the model's tensors.
        design: what is sent, both ways.
        counters, now, seed, revocable, measures: of every table, see `WorkerTable`.

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
        self._design, self._plan = design, plans[0]
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
                    momentum=plans[partition.server].momentum_of(spec),
                )
                tensor.tables.append(table)
            self.tensors.append(tensor)
        self._optimizer: OptimizerRunner | None = None
        if design.downlink != "delta":  # then shards do not run it
            tables = [(table.spec.group, table.values) for table in self.trained_tables()]
            self._optimizer = OptimizerRunner(self._plan.optimizer, self._plan.groups, tables)
        self._averages: list[torch.Tensor] = []

    @property
    def local_step(self) -> LocalStep | None:
        """Applies an average gradient, where that is what shards send; None where they send what is added or stored."""
        return self._step_by if self._design.downlink == "gradient" else None

    def _step_by(self, table: WorkerTable, gradient: torch.Tensor, update: Update) -> None:
        """Updates one table by the rates and options that came with the average gradient."""
        assert self._optimizer is not None
        options: tuple[Options, ...] = self._plan.groups
        if update.options:
            options = apply_changes(self._plan.optimizer, options, update.options)
        self._optimizer.set(Settings(update.rates, options))
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

    def find_nonfinite(self) -> WorkerTable | None:
        """Returns the first table with NaN or Inf in its gradient of this step; None without one."""
        found = list(self.gradients())
        finite = all_finite([gradient for _, gradient in found])
        return next((table for (table, _), is_finite in zip(found, finite, strict=True) if not is_finite), None)

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
        return tuple(PLAIN.encode(each.array, name=each.spec.name) for each in sorted(tables, key=lambda t: t.index))

    def digest(self) -> str:
        """A hash of every parameter's copy."""
        digest = xxhash.xxh3_64()
        for table in self.trained_tables():
            digest.update(table.array.data)
        return digest.hexdigest()

    # ---- averaged weights

    def update_average(self) -> None:
        """average ← ema · average + (1 − ema) · tensor, where the design has an `ema`; it begins with the first step's.

        Statistics of batch norms belong to the weights they were taken with, so they are averaged, too.
        """
        if self._design.ema:
            self._averages = self._with_current()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Inside the block the model has the averaged weights, the current ones included.

        Raises:
            ConfigError: the design averages none.
        """
        if not self._design.ema:
            raise ConfigError(
                f"design {self._design.name!r} averages no weights; ask for it by `ema`, as in 'terngrad[ema=0.9999]'"
            )
        averages = [tensor.values.clone() for tensor in self.tensors] if self.evaluating else self._with_current()
        trained = [tensor.values.clone() for tensor in self.tensors]
        before, self.evaluating = self.evaluating, True
        try:
            self._fill(averages)
            yield
        finally:
            self.evaluating = before  # True within another block
            self._fill(trained)

    def _with_current(self) -> list[torch.Tensor]:
        for tensor in self.tensors:
            if tensor.state:
                tensor.read()
        if not self._averages:
            return [tensor.values.clone() for tensor in self.tensors]
        pairs = zip(self._averages, self.tensors, strict=True)
        return [average.lerp(tensor.values, 1 - self._design.ema) for average, tensor in pairs]

    def _fill(self, values: Sequence[torch.Tensor]) -> None:
        for tensor, value in zip(self.tensors, values, strict=True):
            tensor.values.copy_(value)
            tensor.write()

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Returns residuals, accumulated gradients and random streams by table, the own optimizer's state, averages."""
        state: dict[str, Any] = {"contexts": {table.spec.name: table.state_dict() for table in self.trained_tables()}}
        if self._optimizer is not None:
            state["optimizer"] = self._optimizer.state_dict()
        if self._design.ema:  # empty before the first step
            averages = zip(self.tensors, self._averages, strict=False)
            state["averages"] = {tensor.name: average.clone() for tensor, average in averages}
        return state

    def check_state(self, state: Mapping[str, Any]) -> SavedModel:
        """Returns what `state_dict` returned as a record.

        Raises:
            ConfigError: a table of this model is missing in it, or it is damaged; nothing was changed.
        """
        saved = read(SavedModel, state, "a worker's model")
        for table in self.trained_tables():
            if (found := saved.contexts.get(table.spec.name)) is None:
                known = sorted(saved.contexts)[:8]
                raise ConfigError(f"the state has no residual for {table.spec.name!r}; it has {known} …")
            table.check_state(found)
        if self._design.ema and saved.averages:
            check_sizes(saved.averages, {each.name: each.values.numel() for each in self.tensors}, "averages")
        return saved

    def load_residuals(self, state: Mapping[str, Any]) -> None:
        """Restores residuals, accumulated gradients and random streams. Raises as `check_state`."""
        saved = self.check_state(state)
        for table in self.trained_tables():
            table.load_state_dict(saved.contexts[table.spec.name])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned. Raises as `check_state`."""
        saved = self.check_state(state)
        if self._optimizer is not None:
            self._optimizer.load_state_dict(saved.optimizer or {})  # first: it may refuse
        self.load_residuals(state)
        if self._design.ema:
            self._averages = [
                saved.averages[each.name].to(each.values.device, copy=True) for each in self.tensors if saved.averages
            ]
