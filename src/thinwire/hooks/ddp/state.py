"""The state of one rank's DDP hook: what its buckets hold, beside what travels with a checkpoint."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.collective.core import Bucket
from thinwire.errors import ConfigError, check_keys
from thinwire.hooks.exchange.state import ExchangeState


class Reduction(NamedTuple):
    """An all-reduce under way.

    Args:
        work: to wait for.
        buffer: of the gradients, and then of their averages.
        averages: what DDP waits for.
    """

    work: dist.Work
    buffer: torch.Tensor
    averages: torch.futures.Future[torch.Tensor]


class _Emptied:
    """Whether a parameter's gradient was None when a backward pass came to it, since that was last asked.

    It costs a microsecond a pass. A hook of the tensor's own would be in the way of `torch.compile`.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self._found = False
        # DDP keeps the node, and the node has the parameter in any case.
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        self._handle = node.register_prehook(lambda _: self._look(parameter))

    def _look(self, parameter: torch.Tensor) -> None:
        self._found = self._found or parameter.grad is None

    def take(self) -> bool:
        """Returns it, and looks anew."""
        found, self._found = self._found, False
        return found

    def close(self) -> None:
        """Looks no more."""
        self._handle.remove()


class ThinwireState(ExchangeState):
    """The state that `ddp.compress` returns, as of `ExchangeState`.

    Attributes:
        group: of DDP.
        under_way: the step's all-reduces.
        emptied: whether gradients were None since the last compressed step.
        take_bucket: what the hook calls, which torch.compile leaves as it is.
    """

    take_bucket: Callable[..., torch.futures.Future[torch.Tensor]]

    def __init__(self, *, parameters: Mapping[str, torch.Tensor], model: DistributedDataParallel, **kept: Any) -> None:
        super().__init__(**kept)
        # DDP's reducer would free the group with the interpreter's lock held, and hang where one of the group's threads
        # waits for it. DDP drops this state after its reducer, and what Python has last is freed without the lock.
        self.group: dist.ProcessGroup = model.process_group
        self._model = weakref.ref(model)  # which has this state
        self.under_way: list[Reduction] = []
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._orders = {name: _order(parameter) for name, parameter in parameters.items()}
        self._buckets: dict[tuple[int, ...], Bucket] = {}
        self.emptied = _Emptied([*parameters.values()][-1])  # which a backward pass comes to first, as a rule

    def close(self) -> None:
        super().close()
        self.emptied.close()

    @property
    def reduces_late(self) -> bool:
        """Whether DDP may call the hook for all buckets, and wait for them at once, when a backward pass is over."""
        model = self._model()
        return model is None or bool(model.static_graph)

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of this rank's state; see `ExchangeState.state_dict`.

        DDP reduces a dense tensor in the order of its memory, and so residuals are kept and saved: those of a
        channels_last convolution in another than a contiguous one's. `orders` has the dimensions in that order.
        """
        return self._with_orders(super().state_dict())

    def blank_state_dict(self, world_size: int) -> dict[str, Any]:
        """Returns a state of all ranks, filled with zeros; see `ExchangeState.blank_state_dict`."""
        return self._with_orders(super().blank_state_dict(world_size), blank=True)

    def _with_orders(self, state: dict[str, Any], *, blank: bool = False) -> dict[str, Any]:
        for part in state["ranks"].values():
            orders = {
                name: torch.tensor(self._orders[name], dtype=torch.int64, device="cpu") for name in part["residuals"]
            }
            part["orders"] = {name: order * (not blank) for name, order in orders.items()}
        return state

    def _load_residuals(self, state: Mapping[str, Any]) -> None:
        for part in state["ranks"].values():
            check_keys(part, ["orders"])
            for name, saved in part["orders"].items():
                self._check_order(name, saved.tolist())
        super()._load_residuals(state)

    def _check_order(self, name: str, saved: list[int]) -> None:
        """Raises ConfigError where a tensor lay otherwise in memory, and its values would go to other weights."""
        order = self._orders.get(name)
        if order is not None and order != saved:
            raise ConfigError(
                f"the state holds {name!r} with its dimensions in the order {saved} in memory, and here it is {order}: "
                "every value would go to another weight. Before DistributedDataParallel, bring the model into the "
                "memory format that it was saved in, as with model.to(memory_format=torch.channels_last), or "
                "torch.contiguous_format; or begin anew from the weights"
            )

    def check_divisor(self) -> None:
        """Raises ConfigError inside a `join` that wants sums divided by the ranks that are left: DDP tells no hook."""
        model = self._model()
        if model is not None and not getattr(model, "_divide_by_initial_world_size", True):
            raise ConfigError(
                "join(divide_by_initial_world_size=False) divides gradients by the ranks that still have data, and "
                "DDP tells no communication hook of them; leave the argument out, or give every rank as many batches"
            )

    def finish_reductions(self) -> None:
        """Waits for the step's all-reduces; called at the end of a backward pass, before DDP waits for their futures.

        Raises:
            RuntimeError: a rank is gone, in gloo's words.
        """
        under_way, self.under_way = self.under_way, []
        for work, buffer, averages in under_way:
            work.wait()
            if self.auto is not None:
                self.auto.flush.reduced(buffer)
            averages.set_result(buffer)
        if self.auto is not None:
            self.auto.exposed()

    def bucket(self, shown: dist.GradBucket) -> Bucket:  # type: ignore[name-defined]
        """Returns what a bucket of DDP's holds; made when DDP first shows a bucket of these parameters."""
        parameters = shown.parameters()
        key = tuple(map(id, parameters))
        found = self._buckets.get(key)
        if found is None:
            unknown = [tuple(p.shape) for p in parameters if id(p) not in self._names]
            if unknown:
                raise ConfigError(f"DDP shows parameters of shape {unknown[:4]} that ddp.compress has not seen")
            if len(self._buckets) > 4 * len(self._names):  # DDP rebuilds its buckets, but not for ever
                self._buckets.clear()
            buffer = shown.buffer()
            offsets = tuple(
                (self._names[id(parameter)], gradient.storage_offset() - buffer.storage_offset())
                for parameter, gradient in zip(parameters, shown.gradients(), strict=True)
            )
            found = self._buckets[key] = Bucket(offsets, buffer.nbytes)
        return found


def _order(parameter: torch.Tensor) -> list[int]:
    """Returns the dimensions, but those of one value, as DDP keeps them in memory, the outermost first."""
    dims, strides = [dim for dim, size in enumerate(parameter.shape) if size != 1], parameter.stride()
    order = sorted(dims, key=lambda dim: -strides[dim])
    # What has holes, or lies over itself, DDP keeps as if it were contiguous.
    return order if parameter.squeeze().permute([dims.index(dim) for dim in order]).is_contiguous() else dims
