"""The state of one rank's DDP hook: its buckets, added to the state that checkpoints contain."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.collective.core import Bucket
from thinwire.errors import ConfigError
from thinwire.hooks.exchange.saved import layout_of
from thinwire.hooks.exchange.state import ExchangeState
from thinwire.hooks.guards import Gradients, Place, is_zeroed, parameter_at


class Reduction(NamedTuple):
    """An all-reduce under way.

    Args:
        work: gloo's or NCCL's.
        buffer: the gradients, and then their averages.
        averages: the future that DDP waits for.
    """

    work: dist.Work
    buffer: torch.Tensor
    averages: torch.futures.Future[torch.Tensor]


class BucketGradients(Gradients):
    """Gradients in DDP's buckets, checked by autograd hooks, because DDP fills buckets before its hook runs.

    A hook costs a microsecond, so one parameter represents all until `follow` is called. Hooks on tensors would
    disturb `torch.compile`.

    Args:
        places: of the parameters, by name.
    """

    def __init__(self, places: Mapping[str, Place]) -> None:
        super().__init__(places)
        self._followed = set[str]()
        self._found, self._reached = set[str](), set[str]()
        self._handles: list[Any] = []
        self._hook([*places][-1:])  # usually the first parameter that a backward pass reaches

    def follow(self) -> None:
        self._hook(self.places.keys() - self._followed)

    def emptied(self, names: Collection[str]) -> set[str]:
        followed = {*names} & self._followed
        found = followed & self._found | super().emptied(followed)  # the pass has not reached all of them yet
        return {*names} if len(self._followed) < len(self.places) and found else found

    def unaveraged(self) -> set[str]:
        return self._reached

    def end_pass(self) -> None:
        """Resets after a backward pass."""
        self._found.clear()
        self._reached.clear()

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, names: Iterable[str]) -> None:
        for name in names:
            parameter = parameter_at(self.places[name])
            if parameter is not None:  # this keeps no parameter alive: DDP has the node, which has the parameter
                node = torch.autograd.graph.get_gradient_edge(parameter).node
                self._handles.append(node.register_prehook(partial(self._check, name, parameter)))
                self._followed.add(name)

    def _check(self, name: str, parameter: torch.Tensor, _gradients: object) -> None:
        self._reached.add(name)
        if parameter.grad is None or (len(self._followed) > 1 and is_zeroed(parameter)):
            self._found.add(name)


class ThinwireState(ExchangeState):
    """The state that `ddp.compress` returns, an `ExchangeState`.

    Attributes:
        group: of DDP.
        under_way: the step's all-reduces.
        gradients: of the compressed parameters.
        take_bucket: the function that the hook calls, which torch.compile does not trace.
    """

    take_bucket: Callable[..., torch.futures.Future[torch.Tensor]]

    def __init__(
        self,
        *,
        parameters: Mapping[str, torch.Tensor],
        model: DistributedDataParallel,
        gradients: BucketGradients,
        **kept: Any,
    ) -> None:
        super().__init__(model=model, layouts={name: layout_of(each) for name, each in parameters.items()}, **kept)
        # DDP's reducer would free the group while it holds the interpreter's lock, and hang if one of the group's
        # threads waits for the lock. DDP drops this state after its reducer, so Python frees the group, without the
        # lock.
        self.group: dist.ProcessGroup = model.process_group
        self._model = weakref.ref(model)  # the model has this state
        self.under_way: list[Reduction] = []
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._buckets: dict[tuple[int, ...], Bucket] = {}
        self.gradients = gradients

    def close(self) -> None:
        super().close()
        self.gradients.close()

    @property
    def reduces_late(self) -> bool:
        """Whether DDP may call the hook for all buckets at the end of a backward pass, and then wait for them."""
        model = self._model()
        return model is None or bool(model.static_graph)

    def check_divisor(self) -> None:
        """Raises ConfigError inside a `join` that divides sums by the remaining ranks: DDP does not report these."""
        model = self._model()
        if model is not None and not getattr(model, "_divide_by_initial_world_size", True):
            raise ConfigError(
                "join(divide_by_initial_world_size=False) divides gradients by the ranks that still have data, and DDP "
                "does not report these to communication hooks; leave the argument out, or give every rank as many "
                "batches"
            )

    def finish_reductions(self) -> None:
        """Waits for the step's all-reduces; called at the end of a backward pass, before DDP waits for their futures.

        Raises:
            RuntimeError: a rank is gone; the message is gloo's.
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
        """Returns the description of a DDP bucket, made when DDP first shows a bucket of these parameters."""
        parameters = shown.parameters()
        key = tuple(map(id, parameters))
        found = self._buckets.get(key)
        if found is None:
            unknown = [tuple(p.shape) for p in parameters if id(p) not in self._names]
            if unknown:
                raise ConfigError(f"DDP shows parameters of shape {unknown[:4]} that ddp.compress has not seen")
            if len(self._buckets) > 4 * len(self._names):  # DDP rebuilds its buckets a few times
                self._buckets.clear()
            buffer = shown.buffer()
            offsets = tuple(
                (self._names[id(parameter)], gradient.storage_offset() - buffer.storage_offset())
                for parameter, gradient in zip(parameters, shown.gradients(), strict=True)
            )
            found = self._buckets[key] = Bucket(offsets, buffer.nbytes)
        return found
