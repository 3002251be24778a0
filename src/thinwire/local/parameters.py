"""The parameters that all workers share, beside the model's own: what local steps changed, and the merge.

    Δ = θ − local − offset      a worker's change, minus sign; workers average it
    local ← (1 − keep)·θ + keep·local − withheld·residual

The offset is the difference between θ and local after a merge, which no Δ holds: the share that was kept, and the
rounding of a parameter's dtype. A residual that the merge subtracts goes one of two ways, which round differently:

    lend     the residual stays in its memory, and the offset takes it out of Δ again
    move     it leaves the residual's memory, and the next Δ holds it; no offset is needed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from thinwire.optimizers.outer_momentum import OuterMomentum


@dataclass(slots=True, eq=False)
class LocalTensor:
    """A parameter or buffer of the model, and where its shared values lie.

    Args:
        name: in the model.
        parameter: the model's own, changed in place.
        fragment: with which tensors it is exchanged.
        sends_some: whether its codec sends some of the values.
        group: of the outer optimizer: 0 for parameters, 1 for buffers.
        travels_as: among ranks, the name under which it is exchanged; tensors of one name share a frame.
        withheld: residuals that a merge subtracts, each with the begin and end of its slice.
        momenta: that this end adds to slices of the values itself.

    Attributes:
        values: equal bit for bit at all workers, float32[n].
        change: Δ, and among ranks the average of it, float32[n].
        offset: float32[n], or None where it is 0.
        shown: the model's tensor, detached.
    """

    name: str
    parameter: torch.Tensor
    fragment: int
    sends_some: bool = False
    group: int = 0
    travels_as: str = ""
    withheld: list[tuple[int, int, torch.Tensor]] = field(default_factory=list)
    momenta: list[tuple[slice, OuterMomentum]] = field(default_factory=list)
    values: torch.Tensor = field(init=False)
    change: torch.Tensor = field(init=False)
    offset: torch.Tensor | None = field(default=None, init=False)
    shown: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.shown = self.parameter.detach()

    @property
    def is_plain(self) -> bool:
        """Whether local values are float32 in the order of the shared ones."""
        return self.parameter.dtype == torch.float32 and self.parameter.is_contiguous()

    @property
    def shared(self) -> torch.Tensor:
        """θ: the values with the momentum that this end adds; the values themselves, or a copy."""
        shared = self.values
        for span, outer in self.momenta:
            if outer.ahead is not None:
                shared = shared.clone() if shared is self.values else shared
                shared[span] += outer.ahead.view(-1)
        return shared

    @property
    def local(self) -> torch.Tensor:
        """The values in the model now: float32[n], the model's own memory where possible."""
        return self.shown.to(torch.float32).contiguous().view(-1)

    def take_change(self) -> torch.Tensor:
        """Writes Δ to `change`, which is returned."""
        torch.sub(self.values.view(self.shown.shape), self.shown, out=self.change.view(self.shown.shape))
        return self.change if self.offset is None else self.change.sub_(self.offset)


Merge = Callable[[LocalTensor, float, float], None]
"""Continues a tensor's local values from θ; numbers: the share of them that stays, and the share of its residuals."""


def lend(tensor: LocalTensor, keep: float, withhold: float) -> None:
    """Merges; residuals stay in their memory."""
    merged = shared = tensor.shared
    if keep:
        merged = torch.lerp(merged, tensor.local, keep)
    if withhold and tensor.withheld:
        out = tensor.shown.view(-1) if tensor.is_plain else torch.empty_like(merged)
        for begin, end, residual in tensor.withheld:
            torch.sub(merged[begin:end], residual, alpha=withhold, out=out[begin:end])
        merged = out
    if merged.data_ptr() != tensor.shown.data_ptr():
        tensor.shown.copy_(merged.view(tensor.shown.shape))
    if merged is shared is tensor.values and tensor.shown.dtype == torch.float32:
        tensor.offset = None
    else:
        tensor.offset = torch.sub(tensor.values, tensor.local, out=tensor.offset)


def move(tensor: LocalTensor, keep: float, withhold: float) -> None:
    """Merges; residuals leave their memory as far as they are subtracted."""
    if tensor.is_plain and not keep:
        tensor.shown.copy_(tensor.values.view(tensor.shown.shape))
        tensor.offset = None
        _subtract(tensor, tensor.shown.view(-1), withhold)
        return
    began = tensor.values.clone()
    _subtract(tensor, began, withhold)
    kept = keep * (tensor.local - tensor.values) if keep else 0.0
    tensor.shown.copy_((began + kept).view(tensor.shown.shape))
    tensor.offset = began.sub_(tensor.local)


def _subtract(tensor: LocalTensor, values: torch.Tensor, share: float) -> None:
    if share:
        for begin, end, residual in tensor.withheld:
            values[begin:end].sub_(residual, alpha=share)
            residual.mul_(1 - share)


class SharedParameters:
    """The shared parameters of one worker.

    Args:
        tensors: of the model.
        num_fragments: how many fragments they are in.
        merge: what becomes of residuals that a merge subtracts: `lend` or `move`.

    Attributes:
        tensors: the same.
        every: the numbers of all fragments.
        evaluating: whether the model has the shared values for now.
    """

    def __init__(self, tensors: Sequence[LocalTensor], num_fragments: int, merge: Merge) -> None:
        self.tensors, self.every = list(tensors), range(num_fragments)
        self._fragments: list[list[LocalTensor]] = [[] for _ in self.every]
        for tensor in tensors:
            self._fragments[tensor.fragment].append(tensor)
        self.evaluating = False
        self._merge = merge

    def of(self, fragments: Sequence[int]) -> list[LocalTensor]:
        """Returns the tensors of some fragments."""
        return [tensor for fragment in fragments for tensor in self._fragments[fragment]]

    def merge(self, fragments: Sequence[int], keep: float = 0.0, withhold: float = 0.0) -> None:
        """Continues the local parameters of some fragments from the shared ones.

        Args:
            fragments: to merge.
            keep: the share of the local parameters that stays.
            withhold: the share of the residuals that is subtracted from them.
        """
        for tensor in self.of(fragments):
            self._merge(tensor, keep, withhold)

    def put_back(self, fragments: Sequence[int]) -> None:
        """Where residuals have moved: moves what local parameters differ by into them, before a merge keeps nothing."""
        if self._merge is not move:
            return
        for tensor in (each for each in self.of(fragments) if each.withheld):
            change = tensor.values - tensor.local
            for begin, end, residual in tensor.withheld:
                residual.add_(change[begin:end])
                if tensor.offset is not None:
                    residual.sub_(tensor.offset[begin:end])

    def is_finite(self) -> bool:
        """Whether all local parameters are finite."""
        return all(bool(tensor.shown.isfinite().all()) for tensor in self.tensors)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside the block the model has the shared values."""
        before, own = self.evaluating, [tensor.shown.clone() for tensor in self.tensors]
        self.evaluating = True
        try:
            for tensor in self.tensors:
                tensor.shown.copy_(tensor.shared.view(tensor.shown.shape))
            yield
        finally:
            self.evaluating = before
            for tensor, values in zip(self.tensors, own, strict=True):
                tensor.shown.copy_(values)

    def offsets(self) -> dict[str, torch.Tensor]:
        """Returns copies of the offsets, for a state."""
        return {each.name: each.offset.cpu().clone() for each in self.tensors if each.offset is not None}

    def load_offsets(self, offsets: Mapping[str, Any]) -> None:
        """Takes back what `offsets` returned."""
        for tensor in self.tensors:
            offset = offsets.get(tensor.name)
            # Where the tensor is, which need not be where it was; a copy, for it is written to.
            tensor.offset = None if offset is None else offset.to(tensor.values.device, copy=True)
