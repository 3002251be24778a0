"""Saved states of hooks: checks before any change, and the merge of all ranks' states."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import torch

from thinwire.collective.residuals import check_form
from thinwire.errors import ConfigError
from thinwire.states import Count, Finite, read

FORMAT = 1


class Layout(NamedTuple):
    """The order of a flat residual's values in its tensor.

    Args:
        shape: of the whole tensor.
        order: the dimensions of more than one value, in memory order, the outermost first.
        cut: the dimension along which the tensor is cut into shards; −1 if it is whole.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    cut: int = -1

    def tensor(self) -> torch.Tensor:
        """Returns the layout as a tensor, for a state."""
        return torch.tensor([self.cut, *self.shape, *self.order], dtype=torch.int64, device="cpu")

    def check(self, name: str, saved: Sequence[int]) -> None:
        """Raises ConfigError if a tensor had another layout; another cut is allowed, as residuals can be cut anew."""
        cut, shape, order = saved[:1], saved[1 : 1 + len(self.shape)], saved[1 + len(self.shape) :]
        cuts = range(-1, 0) if self.cut < 0 else range(len(self.shape))
        if [*shape] != [*self.shape] or not cut or cut[0] not in cuts:
            raise ConfigError(
                f"the state holds {name!r} in the shape {[*shape, *order]}, and here it is {[*self.shape]}: every "
                "value would go to another weight. Load it with the model that it was saved with"
            )
        if [*order] != [*self.order]:
            raise ConfigError(
                f"the state holds {name!r} with its dimensions in the order {[*order]} in memory, and here it is "
                f"{[*self.order]}: every value would go to another weight. Before wrapping, bring the model into the "
                "memory format that it was saved in, as with model.to(memory_format=torch.channels_last), or "
                "torch.contiguous_format; or begin anew from the weights"
            )


def row_major(tensors: Mapping[str, torch.Tensor]) -> dict[str, Layout]:
    """Returns the layouts of tensors that are sent in the order of their indices, not of their memory."""
    return {name: Layout(tuple(each.shape), tuple(range(each.ndim))) for name, each in tensors.items()}


def layout_of(tensor: torch.Tensor) -> Layout:
    """Returns the layout of a tensor that is reduced in the order of its memory, as in DDP."""
    dims, strides = [dim for dim, size in enumerate(tensor.shape) if size != 1], tensor.stride()
    order = sorted(dims, key=lambda dim: -strides[dim])
    # DDP stores gradients of tensors with gaps or overlaps contiguously.
    dense = tensor.squeeze().permute([dims.index(dim) for dim in order]).is_contiguous()
    return Layout(tuple(tensor.shape), tuple(order if dense else dims))


class SavedPart(msgspec.Struct, frozen=True):
    """One rank's part of a hook's state, without its residuals."""

    layouts: dict[str, torch.Tensor]
    auto: str = ""


class SavedHook(msgspec.Struct, frozen=True):
    """The `state_dict()` of a hook, or the merge of all ranks'."""

    format: int
    world_size: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    step: Count
    loss_scale: Finite
    ranks: dict[str, dict[str, Any]]
    reduce: str = "mean"
    group: str = ""
    replicas: Count = 0


def check_saved(state: object) -> None:
    """Checks the form of a state, of one rank or merged from several, independent of the model.

    Raises:
        ConfigError: the state has another format, or is damaged.
    """
    saved_as = state.get("format") if isinstance(state, Mapping) else None
    if not isinstance(state, Mapping) or not isinstance(saved_as, int) or saved_as != FORMAT:
        found = repr(state.get("format")) if isinstance(state, Mapping) else f"none: it is a {type(state).__name__}"
        raise ConfigError(f"the state has format {found}; this thinwire reads {FORMAT}")
    saved = read(SavedHook, state, "a hook")
    # 0 means that no step has read the scaler yet. Residuals are multiplied by the scale, or by its reciprocal.
    if saved.loss_scale < 0 or (saved.loss_scale and not 1 / saved.loss_scale < math.inf):
        raise ConfigError(f"the state is damaged: its loss_scale is {saved.loss_scale}")
    for rank, part in saved.ranks.items():
        check_form(part, f"rank {rank}")
        layouts = read(SavedPart, part, f"rank {rank}").layouts.values()
        if any(each.ndim != 1 or not each.numel() or each.is_floating_point() for each in layouts):
            raise ConfigError(f"the state is damaged: the layouts of rank {rank} are no lists of sizes")


def merge(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns one state that contains every rank's, for a run with another number of ranks.

    Args:
        states: the `state_dict()` of every rank, in any order.

    Raises:
        ConfigError: the states are of different runs or steps.

    Example:
        >>> parts = [{"format": 1, "world_size": 2, "step": 5, "loss_scale": 1.0, "ranks": {r: {}}} for r in "01"]
        >>> sorted(merge(parts)["ranks"])
        ['0', '1']
    """
    if not states:
        raise ConfigError("merge needs at least one state")
    first = states[0]
    for state in states:
        for key in ("format", "world_size", "replicas", "group", "step", "loss_scale"):
            if state.get(key) != first.get(key):
                there, here = first.get(key), state.get(key)
                raise ConfigError(f"states of different runs or steps: {key} is {there!r} and {here!r}")
    return {**first, "ranks": {rank: part for state in states for rank, part in state["ranks"].items()}}
