"""This rank's unsent values: one residual for every value of every compressed parameter.

For other owners' slices it holds the residual of this rank's gradient; for its own slices, the residual of the average
(DoubleSqueeze, algorithm 1, in all-reduce form). Residuals are kept by parameter name and slice, never by bucket, so
they survive DDP's bucket rebuild; they can be saved, restored for a skipped step, and converted to another number of
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from thinwire.codecs import Context
from thinwire.codecs.lag import LagBound
from thinwire.codecs.scheme import stream_seed
from thinwire.collective.snapshot import Snapshot
from thinwire.collective.trained import Partitions, TrainedTensor, partition
from thinwire.errors import ConfigError, check_keys
from thinwire.policies.assignment import Partition
from thinwire.policies.compression import Choice
from thinwire.states import read

Float64Array = npt.NDArray[np.float64]

KINDS = ("residuals", "encodes", "owners", "lags")
"""The entries of `Residuals.state_dict` for every compressed tensor."""


def outstanding(
    tensors: Sequence[TrainedTensor],
    states: Sequence[Mapping[str, Any]],
    *,
    mean: bool,
    partitions: Partitions | None = None,
) -> dict[str, Float64Array]:
    """Returns the values that a run has still to add to the averaged gradient, by name of its compressed tensors.

    A rank's residual counts 1/ranks in the average; the owner's residual, of the average itself, counts in full:

        T = Σ r_i/N + δ

    Args:
        tensors: in an order that all ranks share.
        states: the `state_dict` of every rank's residuals, in rank order.
        mean: whether ranks averaged or summed.
        partitions: the slices of the tensors; by default those of `partition`.

    Raises:
        ConfigError: a state of other slices.
    """
    placed, totals = partitions or partition(tensors, len(states)), {}
    for tensor in tensors:
        if tensor.uncompressed:
            continue
        total = totals[tensor.name] = np.zeros(tensor.numel, np.float64)
        for rank, state in enumerate(states):
            flat = state["residuals"][tensor.name].cpu().numpy().astype(np.float64)
            for part in _owned(placed[tensor.name], state["owners"][tensor.name]):
                weight = 1.0 if part.server == rank or not mean else 1 / len(states)
                total[part.start : part.stop] += weight * flat[part.start : part.stop]
    return totals


class SavedResiduals(msgspec.Struct, frozen=True):
    """`Residuals.state_dict` as a record, by tensor."""

    residuals: dict[str, torch.Tensor]
    encodes: dict[str, torch.Tensor]
    owners: dict[str, torch.Tensor]
    lags: dict[str, torch.Tensor]
    own: dict[str, Any] | None = None
    """The same for the owners' own gradients, or None."""


class Residuals:
    """The compression contexts of one rank, by tensor and slice.

    Args:
        tensors: every trained tensor, in an order that all ranks share.
        rank: this rank.
        world: number of ranks.
        mean: whether ranks average (True) or sum.
        seed: of random codecs; each rank derives a different stream.
        partitions: the slices of every tensor and their owners; by default those of `partition`.
        of_senders: whether means are over the ranks that sent a value, so that owners encode their own gradients, too.

    Attributes:
        own: the residuals of the owners' own gradients; None where owners do not encode them.
    """

    def __init__(
        self,
        tensors: Sequence[TrainedTensor],
        rank: int,
        world: int,
        *,
        mean: bool,
        seed: int,
        partitions: Partitions | None = None,
        of_senders: bool = False,
    ) -> None:
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self.rank = rank
        self.world = world
        self.mean = mean
        self.partitions = partitions or partition(tensors, world)
        self.contexts: dict[tuple[str, Partition], Context] = {}
        for tensor in self._compressed():
            for part in self.partitions[tensor.name]:
                codec = tensor.choice.down if part.server == rank else tensor.choice.up
                like = torch.empty(tensor.shape or part.numel, dtype=tensor.compute_dtype, device=tensor.device)
                name = part.label(tensor.name)
                self.contexts[tensor.name, part] = codec.context(like, name=name, seed=stream_seed(seed, rank))
        self.own: Residuals | None = None
        if of_senders:
            both_ways = [replace(each, choice=Choice(each.choice.up, each.choice.up)) for each in self._compressed()]
            sparse = [each for each in both_ways if each.choice.up.scheme.sends_some]
            owned = {t.name: tuple(each for each in self.partitions[t.name] if each.server == rank) for t in sparse}
            # From another stream than the average's: the same draws would round the same values up again.
            apart = stream_seed(seed, None)
            self.own = Residuals(sparse, rank, world, mean=mean, seed=apart, partitions=owned)
        self._snapshot = Snapshot(self.contexts)

    def _compressed(self) -> list[TrainedTensor]:
        return [tensor for tensor in self.tensors.values() if not tensor.uncompressed]

    def names(self) -> set[str]:
        """Returns the names of the contexts that keep a residual."""
        return {context.name for context in self.contexts.values() if context.residual is not None}

    def pushes(self, name: str) -> dict[Partition, Context]:
        """Returns the contexts of this rank's gradient of one tensor, by slice."""
        own = {} if self.own is None else self.own.contexts
        every = {part: (own if part.server == self.rank else self.contexts) for part in self.partitions[name]}
        return {part: contexts[name, part] for part, contexts in every.items() if (name, part) in contexts}

    # ---- skipped steps

    def snapshot(self) -> None:
        """Copies every context's state, so that `restore` can undo a step."""
        self._snapshot.take()
        if self.own is not None:
            self.own.snapshot()

    def restore(self) -> None:
        """Restores the last snapshot, bit for bit."""
        self._snapshot.restore()
        if self.own is not None:
            self.own.restore()

    def scale(self, factor: float) -> None:
        """Multiplies every residual, for gradients whose loss scale changed by this factor."""
        for context in self.contexts.values():
            if context.residual is not None:
                context.residual.mul_(factor)
            if context.lag_bound is not None:
                context.lag_bound.scale(factor)
        if self.own is not None:
            self.own.scale(factor)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns copies: by tensor the residual (flat), and for each slice the number of encodes and the owner.

        The state also has each slice's `LagBound.changing`, or zeros for a codec without a bound, so that all codecs
        have the same keys. The residuals of owners' own gradients are a state of the same form, `own`.
        """
        residuals, encodes, owners, lags = {}, {}, {}, {}
        for tensor in self._compressed():
            flat = torch.zeros(tensor.numel, dtype=tensor.compute_dtype, device="cpu")
            parts = self.partitions[tensor.name]
            contexts = [self.contexts[tensor.name, part] for part in parts]
            for part, context in zip(parts, contexts, strict=True):
                if context.residual is not None:
                    flat[part.start : part.stop] = context.residual.view(-1)
            residuals[tensor.name] = flat
            encodes[tensor.name] = torch.tensor([context.step for context in contexts], dtype=torch.int64, device="cpu")
            owners[tensor.name] = torch.tensor([part.server for part in parts], dtype=torch.int64, device="cpu")
            lags[tensor.name] = _no_lags(len(parts))
            for row, context in zip(lags[tensor.name], contexts, strict=True):
                if context.lag_bound is not None:
                    row.copy_(torch.from_numpy(context.lag_bound.changing()))
        own = {} if self.own is None else {"own": self.own.state_dict()}
        return {"residuals": residuals, "encodes": encodes, "owners": owners, "lags": lags, **own}

    def blank_state_dict(self, world: int) -> dict[str, dict[str, torch.Tensor]]:
        """Returns zeros in the form of the state of a rank in a run of `world` ranks."""
        tensors = list(self.tensors.values())
        return blank_state(tensors, partition(tensors, world))

    def owned_alike(self, state: Mapping[str, Any]) -> bool:
        """Returns whether ranks owned the same slices as here, by the state of an equally large run."""
        saved = state["owners"]
        return all(
            _owned(parts, saved[name]) == parts
            for name, parts in self.partitions.items()
            if name in saved and saved[name].numel() == len(parts)
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state of the same rank of an equally large run with the same owners.

        Raises:
            ConfigError: the state does not fit, or holds residuals of tensors whose codec keeps none here; nothing is
                changed.
        """
        self.check_state(state)
        if self.own is not None:
            self.own.load_state_dict(state["own"])
        for name, flat in state["residuals"].items():
            parts = self.partitions[name]
            for part, encodes, lag in zip(parts, state["encodes"][name].tolist(), state["lags"][name], strict=True):
                context = self.contexts[name, part]
                context.step = encodes
                if context.residual is not None:
                    context.residual.view(-1).copy_(flat[part.start : part.stop])
                if context.lag_bound is not None:  # zeros, of a codec without a bound, start a bound
                    context.lag_bound.restore(lag)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError where `load_state_dict` cannot load a state; changes nothing."""
        check_form(state, f"rank {self.rank}")
        check_state(list(self.tensors.values()), state)
        for name, flat in state["residuals"].items():
            self._check_slices(name, flat, state)
        if self.own is not None:
            check_keys(state, ["own"])
            self.own.check_state(state["own"])

    def _check_slices(self, name: str, flat: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Raises ConfigError where a state does not fit a tensor's slices."""
        parts, encodes = self.partitions[name], state["encodes"][name]
        contexts = [self.contexts[name, part] for part in parts]
        lags = torch.as_tensor(state["lags"][name], dtype=torch.float64, device="cpu").numpy()
        damaged = lags.shape != tuple(_no_lags(len(parts)).shape) or not np.isfinite(lags).all() or (lags < 0).any()
        if damaged or encodes.shape != (len(parts),) or encodes.is_floating_point() or bool((encodes < 0).any()):
            raise ConfigError(f"the state of {name!r} is damaged, or of other slices; take another file of that step")
        for part, context in zip(parts, contexts, strict=True):
            if context.residual is None and flat[part.start : part.stop].any():
                raise ConfigError(
                    f"the state holds what was not sent of {name!r} yet, and {context.codec.id} here keeps no "
                    "residual: load it with the codec it was saved with, or begin anew from the weights"
                )

    def load_resized(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Loads the states of a run with another number of ranks. Raises ConfigError where a state does not fit.

        Values still to be added to the averaged gradient are summed over the old ranks and divided among the new ones.
        """
        for state in states:
            check_state(list(self.tensors.values()), state)
        self.load_outstanding(outstanding(list(self.tensors.values()), states, mean=self.mean))

    def load_outstanding(self, totals: Mapping[str, Float64Array]) -> None:
        """Replaces the residuals by this rank's part of T, the values still to be added to the averaged gradient.

        Every holder gets T/holders: δ' = T/holders, r'_i = N·T/holders. One of them, the owner where averages keep
        residuals, also takes the rounding error of T.

        Raises:
            ConfigError: no rank here keeps a residual of values that are still to be added; nothing has changed.
        """
        held = {tensor.name: self._holders(tensor) for tensor in self._compressed()}
        if lost := sorted(name for name, total in totals.items() if not held.get(name) and total.any()):
            raise ConfigError(
                f"the state holds gradients that are still to be added to {', '.join(lost[:4])}"
                f"{', …' if len(lost) > 4 else ''}, and no rank here keeps a residual of them: take the codec that "
                "they were saved with or another that keeps residuals, on two ranks at least"
            )
        for tensor in self._compressed():
            total = totals[tensor.name]
            down = tensor.choice.down.residual_by_default
            holders = self._holders(tensor)
            counts = 1 / self.world if self.mean else 1.0  # weight of a rank's residual in the average
            for part in self.partitions[tensor.name]:
                context = self.contexts[tensor.name, part]
                residual = context.residual
                if context.lag_bound is not None:
                    context.lag_bound.restore(_no_lags(1)[0])  # its measurements were of another residual
                if residual is not None:
                    whole = torch.from_numpy(total[part.start : part.stop])
                    equal = (whole / (holders * counts)).to(residual.dtype)
                    last = part.server if down else max(set(range(self.world)) - {part.server})
                    left = whole - (holders - 1) * counts * equal.double()
                    residual.view(-1).copy_(equal if self.rank != last else left / (1.0 if down else counts))

    def _holders(self, tensor: TrainedTensor) -> int:
        """Returns the number of ranks that keep a residual of each value."""
        return (self.world - 1) * tensor.choice.up.residual_by_default + tensor.choice.down.residual_by_default


def blank_state(tensors: Sequence[TrainedTensor], partitions: Partitions) -> dict[str, dict[str, torch.Tensor]]:
    """Returns zeros in the form of the `state_dict` of a rank's residuals."""
    compressed = [tensor for tensor in tensors if not tensor.uncompressed]
    counts = {t.name: torch.zeros(len(partitions[t.name]), dtype=torch.int64, device="cpu") for t in compressed}
    return {
        "residuals": {t.name: torch.zeros(t.numel, dtype=t.compute_dtype, device="cpu") for t in compressed},
        "encodes": counts,
        "owners": {name: count.clone() for name, count in counts.items()},
        "lags": {t.name: _no_lags(len(partitions[t.name])) for t in compressed},
    }


def _owned(parts: Sequence[Partition], owners: torch.Tensor) -> tuple[Partition, ...]:
    """Returns slices with the owners in a state. Raises ConfigError for a state of other slices."""
    if owners.numel() != len(parts):
        raise ConfigError(
            f"the state is damaged, or of other slices: it has {owners.numel()} slices of a tensor that was in "
            f"{len(parts)}; take another file of that step, or a state that this version has saved"
        )
    return tuple(replace(part, server=owner) for part, owner in zip(parts, owners.tolist(), strict=True))


def _no_lags(slices: int) -> torch.Tensor:
    """Returns the saved lags of a codec without a bound, which also reset a bound."""
    return torch.zeros(slices, len(LagBound(1, 1).changing()), dtype=torch.float64, device="cpu")


def check_form(state: object, of: str) -> None:
    """Checks the form of a rank's residuals, for any tensors.

    Args:
        state: from `Residuals.state_dict`, perhaps with further entries.
        of: its owner, for messages.

    Raises:
        ConfigError: it has no dense tensors by name, or a residual is not finite.
    """
    saved = read(SavedResiduals, state, of)
    for name, residual in saved.residuals.items():
        if not residual.is_floating_point():
            raise ConfigError(f"the state is damaged: what {of} has not sent of {name!r} is of {residual.dtype}")


def check_state(tensors: Sequence[TrainedTensor], state: Mapping[str, Any]) -> None:
    """Raises ConfigError where a rank's state is not of these tensors and codecs."""
    check_keys(state, KINDS)
    own = {tensor.name: tensor.numel for tensor in tensors if not tensor.uncompressed}
    found = {name: value.numel() for name, value in state["residuals"].items()}
    if own != found:
        wrong = sorted(name for name in {*own, *found} if own.get(name) != found.get(name))
        here, there = ([sizes.get(name) for name in wrong[:4]] for sizes in (own, found))
        raise ConfigError(
            f"the state does not fit: {wrong[:4]} are here {here} and in the state {there} values; load it with "
            "the model and the exclusions it was saved with"
        )
    for kind in KINDS:
        check_keys(state[kind], own, f"the state's {kind!r}")
