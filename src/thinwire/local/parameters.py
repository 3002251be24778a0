"""The parameters that all ranks share, beside the model's own: what local steps changed, the outer step, the merge.

    Δ = θ − local − offset      a rank's change, minus sign, averaged over the ranks
    θ ← outer(θ, average)       every rank takes the same step on the same bits
    local ← (1 − keep)·θ + keep·local − withheld·residual

A residual that the merge takes out of the local parameters is in the next Δ, and leaves the residual's own memory. The
offset is what a merge leaves between θ and local that no Δ is to hold: what was kept, and what a parameter's dtype
rounds away.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from thinwire.optimizers.options import Options, Settings
from thinwire.optimizers.runner import OptimizerRunner

PIECE_NBYTES = 4_000_000
"""Tensors travel together until their values have so many bytes."""


@dataclass(slots=True, eq=False)
class LocalTensor:
    """A parameter or buffer of the model, and where its shared values lie.

    Args:
        name: in the model.
        parameter: the model's own, changed in place.
        fragment: with which tensors it is exchanged.
        group: of the outer optimizer: 0 for parameters, 1 for buffers.
        travels_as: the name under which it is exchanged; tensors of one name share a frame.
        sends_some: whether its codec sends some of the values.
        values: the shared values, float32[n].
        change: Δ, or the average of it, float32[n].
        offset: float32[n], or None where it is 0.
        withheld: the residuals of slices that other ranks average, each with the slice's begin and end.
    """

    name: str
    parameter: torch.Tensor
    fragment: int
    group: int
    travels_as: str
    sends_some: bool = False
    values: torch.Tensor = field(init=False)
    change: torch.Tensor = field(init=False)
    offset: torch.Tensor | None = None
    withheld: list[tuple[int, int, torch.Tensor]] = field(default_factory=list)
    shown: torch.Tensor = field(init=False)
    """The model's tensor, detached."""

    def __post_init__(self) -> None:
        self.shown = self.parameter.detach()

    @property
    def is_plain(self) -> bool:
        """Whether local values are float32 in the order of the shared ones."""
        return self.parameter.dtype == torch.float32 and self.parameter.is_contiguous()


@dataclass(slots=True, eq=False)
class Piece:
    """Tensors of a fragment and a device, whose shared values lie end to end.

    Args:
        tensors: in this order.
    """

    tensors: list[LocalTensor]
    shared: torch.Tensor = field(init=False)
    changes: torch.Tensor = field(init=False)
    ways: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, LocalTensor]] = field(init=False)
    """Of each tensor the shared values, the change and the model's own, in the parameter's shape."""

    def __post_init__(self) -> None:
        sizes = [each.parameter.numel() for each in self.tensors]
        device = self.tensors[0].parameter.device
        self.shared, self.changes = (torch.zeros(sum(sizes), dtype=torch.float32, device=device) for _ in range(2))
        ends = [*accumulate(sizes)]
        for each, size, end in zip(self.tensors, sizes, ends, strict=True):
            each.values, each.change = self.shared[end - size : end], self.changes[end - size : end]
        self.ways = [
            (each.values.view(each.shown.shape), each.change.view(each.shown.shape), each.shown, each)
            for each in self.tensors
        ]

    @property
    def offsets(self) -> tuple[tuple[str, int], ...]:
        """Where each name's values begin."""
        found: dict[str, int] = {}
        for each in self.tensors:
            found.setdefault(each.travels_as, int(each.values.storage_offset()))
        return tuple(found.items())

    def cut(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Returns each tensor's part of values that lie as the shared ones do."""
        return list(torch.split(values, [each.values.numel() for each in self.tensors]))


class SharedParameters:
    """The shared parameters of one rank and the outer optimizer's state, the same on all ranks.

    Args:
        tensors: of the model; those that share a name of the exchange are of one fragment, device and group.
        outer: the class of the outer optimizer.
        groups: options of its parameter groups.
    """

    def __init__(self, tensors: Sequence[LocalTensor], outer: str, groups: Sequence[Options]) -> None:
        self.tensors = list(tensors)
        self.pieces = [*_pieces(self.tensors)]
        self._options = tuple(groups)
        of_group = [(piece.tensors[0].group, piece.shared) for piece in self.pieces]
        self._outer = OptimizerRunner(outer, self._options, of_group)
        self.evaluating = False

    def of(self, fragments: Sequence[int]) -> list[Piece]:
        """Returns the pieces of some fragments."""
        return [piece for piece in self.pieces if piece.tensors[0].fragment in fragments]

    def take_changes(self, pieces: Sequence[Piece]) -> None:
        """Writes Δ of some pieces to their `changes`."""
        for piece in pieces:
            for shared, change, local, tensor in piece.ways:
                torch.sub(shared, local, out=change)
                if tensor.offset is not None:
                    tensor.change.sub_(tensor.offset)

    def step(self, pieces: Sequence[Piece], rates: Sequence[float]) -> None:
        """Takes the outer optimizer's step by the averages in `changes`."""
        self._outer.set(Settings(tuple(rates), self._options))
        self._outer.step([piece.shared for piece in pieces], [piece.changes for piece in pieces])

    def merge(self, pieces: Sequence[Piece], keep: float = 0.0, withhold: float = 0.0) -> None:
        """Continues the local parameters from the shared ones.

        Args:
            pieces: of some fragments.
            keep: the share of the local parameters that stays.
            withhold: the share of the residuals that moves into the local parameters.
        """
        for piece in pieces:
            plain = [way for way in piece.ways if way[3].is_plain and not keep]
            if plain:
                torch._foreach_copy_([local for _, _, local, _ in plain], [shared for shared, *_ in plain])
            for _, _, local, tensor in plain:
                tensor.offset = None
                _withhold(tensor, local.view(-1), withhold)
            for shared, _, local, tensor in piece.ways:
                if keep or not tensor.is_plain:
                    began = tensor.values.clone()
                    _withhold(tensor, began, withhold)
                    kept = keep * (local.float() - shared) if keep else 0.0
                    local.copy_(began.view(shared.shape) + kept)
                    tensor.offset = began.sub_(local.float().reshape(-1))

    def put_back(self, pieces: Sequence[Piece]) -> None:
        """Moves what local parameters differ by into the residuals, before they are made the shared ones."""
        for tensor in (each for piece in pieces for each in piece.tensors if each.withheld):
            change = tensor.values - tensor.shown.reshape(-1)
            for begin, end, residual in tensor.withheld:
                residual.add_(change[begin:end])
                if tensor.offset is not None:
                    residual.sub_(tensor.offset[begin:end])

    def is_finite(self) -> bool:
        """Whether all local parameters are finite."""
        return all(bool(tensor.shown.isfinite().all()) for tensor in self.tensors)

    def begin_from_model(self) -> None:
        """Takes the model's values as the shared ones."""
        for tensor in self.tensors:
            tensor.values.copy_(tensor.shown.reshape(-1))

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside the block the model has the shared values."""
        before, own = self.evaluating, [tensor.shown.clone() for tensor in self.tensors]
        self.evaluating = True
        try:
            for piece in self.pieces:
                torch._foreach_copy_([local for _, _, local, _ in piece.ways], [shared for shared, *_ in piece.ways])
            yield
        finally:
            self.evaluating = before
            torch._foreach_copy_([tensor.shown for tensor in self.tensors], own)

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of the shared values, the offsets and the outer optimizer's state."""
        return {
            "shared": {each.name: each.values.cpu().clone() for each in self.tensors},
            "offsets": {each.name: each.offset.cpu().clone() for each in self.tensors if each.offset is not None},
            "outer": self._outer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` returned."""
        for tensor in self.tensors:
            tensor.values.copy_(state["shared"][tensor.name])
            offset = state["offsets"].get(tensor.name)
            tensor.offset = None if offset is None else offset.to(tensor.values.device, copy=True)
        self._outer.load_state_dict(state["outer"])


def _withhold(tensor: LocalTensor, values: torch.Tensor, share: float) -> None:
    """Moves a share of a tensor's residuals out of their memory and, with a minus sign, into some values."""
    if share:
        for begin, end, residual in tensor.withheld:
            values[begin:end].sub_(residual, alpha=share)
            residual.mul_(1 - share)


def _pieces(tensors: Sequence[LocalTensor]) -> Iterator[Piece]:
    """Yields consecutive tensors of one fragment, group and device; those of one name in one piece."""
    some: list[LocalTensor] = []
    for tensor in sorted(tensors, key=lambda each: (each.fragment, each.group, str(each.parameter.device))):
        full = 4 * sum(each.parameter.numel() for each in some) >= PIECE_NBYTES
        if some and (
            (full and tensor.travels_as != some[-1].travels_as)
            or (tensor.fragment, tensor.group) != (some[0].fragment, some[0].group)
            or tensor.parameter.device != some[0].parameter.device
        ):
            yield Piece(some)
            some = []
        some.append(tensor)
    if some:
        yield Piece(some)
