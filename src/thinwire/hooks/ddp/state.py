"""What travels with a checkpoint, and what the report reads: the state of one rank's hook."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from thinwire.errors import ConfigError
from thinwire.hooks.ddp.exchange import Share, shares
from thinwire.hooks.ddp.job import Layout, Part
from thinwire.hooks.ddp.mesh import Mesh
from thinwire.hooks.ddp.pipeline import Pipeline
from thinwire.hooks.ddp.residuals import Residuals

FORMAT = 1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `compress` was asked for, beside the codecs.

    Args:
        start_step: steps before it are all-reduced uncompressed, by DDP's own group.
        mean: whether ranks average or sum.
        skip: whether NaN or Inf anywhere makes all ranks skip the step.
        drop_zeros: whether a slice without any gradient is left out.
        gather_nbytes: buckets travel together until their gradients have so many bytes.
    """

    start_step: int
    mean: bool
    skip: bool
    drop_zeros: bool
    gather_nbytes: int


class ThinwireState:
    """The state that `ddp.compress` returns: keep it, and save `state_dict()` with every checkpoint.

    Attributes:
        step: steps taken so far; steps under `no_sync` are part of the next one.
        resumed: how the last `load_state_dict` went, in words; empty before.
        link_bps: bits per second of the slowest link, as measured at the start; 0 where it was not.
    """

    __slots__ = (
        "_layouts",
        "_loss_scale",
        "_names",
        "_scaler",
        "_shares",
        "gathered",
        "group",
        "link_bps",
        "mesh",
        "pipeline",
        "residuals",
        "resumed",
        "settings",
        "step",
    )

    def __init__(
        self,
        *,
        mesh: Mesh,
        residuals: Residuals,
        settings: Settings,
        parameters: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup,
        scaler: Any,
        link_bps: float,
    ) -> None:
        self.mesh = mesh
        self.residuals = residuals
        self.settings = settings
        self.group = group
        self.link_bps = link_bps
        self.step = 0
        self.resumed = ""
        self.pipeline = Pipeline(mesh, residuals, mean=settings.mean, skip=settings.skip)
        self._scaler = scaler
        self._loss_scale = 1.0 if scaler is None else 0.0
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self.gathered: list[Part] = []
        """Buckets of this step that wait for others to travel with."""
        self._shares: dict[tuple[int, ...], tuple[Share, ...]] = {}
        self._layouts: dict[tuple[int, ...], Layout] = {}

    @property
    def steps_skipped(self) -> int:
        """Steps that no rank took because some rank's gradient held NaN or Inf; their gradients are all NaN."""
        return self.pipeline.steps_skipped

    def counters(self) -> dict[str, float]:
        """Returns the sums so far: bytes, values and messages sent, and seconds by purpose."""
        push, pull = self.pipeline.push_counters.snapshot(), self.pipeline.pull_counters.snapshot()
        return {key: push.get(key, 0) + pull.get(key, 0) for key in sorted({*push, *pull})}

    def close(self) -> None:
        """Ends the hook's threads. The model's backward pass cannot be used afterwards."""
        self.pipeline.close()

    # ---- for the hook

    def shares(self, bucket: dist.GradBucket) -> tuple[Share, ...]:  # type: ignore[name-defined]
        """Returns how a bucket is shared out; made when DDP first shows a bucket of these parameters."""
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        found = self._shares.get(key)
        if found is None:
            buffer = bucket.buffer()
            if len(self._shares) > 4 * len(self._names):
                self._shares.clear()
                self._layouts.clear()
            unknown = [tuple(p.shape) for p in parameters if id(p) not in self._names]
            if unknown:
                raise ConfigError(f"DDP shows parameters of shape {unknown[:4]} that ddp.compress has not seen")
            offsets = [
                (self._names[id(parameter)], gradient.storage_offset() - buffer.storage_offset())
                for parameter, gradient in zip(parameters, bucket.gradients(), strict=True)
            ]
            found = self._shares[key] = shares(self.residuals, offsets, drop_zeros=self.settings.drop_zeros)
        return found

    def layout(self, parts: Sequence[Part]) -> Layout:
        """Returns how these buckets travel together; made when they first do."""
        key = tuple(id(part.shares) for part in parts)
        found = self._layouts.get(key)
        if found is None:
            found = self._layouts[key] = Layout([part.shares for part in parts], self.residuals.rank)
        return found

    def follow_loss_scale(self) -> None:
        """Keeps residuals in the units of this step's gradients."""
        if self._scaler is None:
            return
        scale = float(self._scaler.get_scale())
        if self._loss_scale not in (0.0, scale):
            self.residuals.scale(scale / self._loss_scale)
        self._loss_scale = scale

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of this rank's state: save it on every rank, since every rank's residual is another.

        Tensors, numbers and strings alone, under a key of this rank's own: `torch.save` into a file for each rank
        and `torch.distributed.checkpoint` into one folder both keep all of it.
        """
        self.pipeline.wait_step()
        return {
            "format": FORMAT,
            "world_size": self.residuals.world,
            "step": self.step,
            "loss_scale": self._loss_scale,
            "ranks": {str(self.residuals.rank): self.residuals.state_dict()},
        }

    def blank_state_dict(self, world_size: int) -> dict[str, Any]:
        """Returns a state of all ranks of a `world_size`-rank run, filled with zeros.

        `torch.distributed.checkpoint.load` fills what it is given: give it this to read a checkpoint that another
        number of ranks wrote, and pass the result to `load_state_dict`.
        """
        return {
            "format": FORMAT,
            "world_size": world_size,
            "step": 0,
            "loss_scale": 1.0,
            "ranks": {str(rank): self.residuals.blank(world_size) for rank in range(world_size)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> str:
        """Takes a state back, on every rank.

        Args:
            state: this rank's own `state_dict()`, or a `merge` of all ranks'. From a run with another number of
                ranks all are needed: by parameter name, what was still to be sent is summed over the old ranks and
                divided over the new ones.

        Returns:
            What was done, in words; also in `resumed` and in the report.

        Raises:
            ConfigError: another model, other exclusions, or not all ranks that are needed.
        """
        if state.get("format") != FORMAT:
            raise ConfigError(f"the state has format {state.get('format')!r}; this thinwire reads {FORMAT}")
        self.pipeline.wait_step()
        ranks, old = state["ranks"], int(state["world_size"])
        rank, world = self.residuals.rank, self.residuals.world
        if old == world:
            if str(rank) not in ranks:
                raise ConfigError(
                    f"the state is of rank {', '.join(ranks)} and this is rank {rank}: every rank has residuals of its "
                    "own; save state_dict() on every rank and load each one's"
                )
            self.residuals.load(ranks[str(rank)])
            self.resumed = f"resumed at step {state['step']} with this rank's own residuals, bit for bit"
        else:
            missing = [other for other in range(old) if str(other) not in ranks]
            if missing:
                raise ConfigError(
                    f"the state was saved by {old} ranks and this run has {world}; the states of ranks {missing} are "
                    "missing: pass ddp.merge of all of them"
                )
            self.residuals.load_from([ranks[str(other)] for other in range(old)])
            self.resumed = (
                f"resumed at step {state['step']} from {old} ranks on {world}: residuals were summed over the old "
                "ranks by parameter name and divided over the new ones"
            )
            _log.warning("%s", self.resumed)
        self.step = int(state["step"])
        self._loss_scale = float(state["loss_scale"])
        if self._scaler is None and self._loss_scale not in (0.0, 1.0):
            self.residuals.scale(1 / self._loss_scale)
            self._loss_scale = 1.0
        return self.resumed


def merge(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns one state that holds every rank's, for a run with another number of ranks.

    Args:
        states: the `state_dict()` of every rank, in any order.

    Raises:
        ConfigError: they are not of one run at one step.

    Example:
        >>> parts = [{"format": 1, "world_size": 2, "step": 5, "loss_scale": 1.0, "ranks": {r: {}}} for r in "01"]
        >>> sorted(merge(parts)["ranks"])
        ['0', '1']
    """
    if not states:
        raise ConfigError("merge needs at least one state")
    first = states[0]
    for state in states:
        for key in ("format", "world_size", "step", "loss_scale"):
            if state[key] != first[key]:
                raise ConfigError(f"states of different runs or steps: {key} is {first[key]!r} and {state[key]!r}")
    return {**first, "ranks": {rank: part for state in states for rank, part in state["ranks"].items()}}
