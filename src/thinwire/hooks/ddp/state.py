"""The state of one rank's hook: what travels with a checkpoint, and what the report reads."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from thinwire.collective.core import Bucket, Collective
from thinwire.errors import ConfigError
from thinwire.runtime.collective import CollectiveDriver

FORMAT = 1
_log = logging.getLogger(__name__)


class ThinwireState:
    """The state that `ddp.compress` returns: keep it, and save `state_dict()` with every checkpoint.

    Attributes:
        step: steps taken so far; steps under `no_sync` are part of the next one.
        resumed: how the last `load_state_dict` went, in words; empty before.
        link_bps: bits per second of the slowest link, as measured at the start; 0 where it was not.
    """

    __slots__ = (
        "_buckets",
        "_loss_scale",
        "_names",
        "_scaler",
        "core",
        "driver",
        "group",
        "link_bps",
        "resumed",
        "start_step",
        "step",
    )

    def __init__(
        self,
        *,
        core: Collective,
        driver: CollectiveDriver,
        parameters: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup,
        start_step: int,
        scaler: Any,
        link_bps: float,
    ) -> None:
        self.core = core
        self.driver = driver
        self.group = group
        self.start_step = start_step
        self.link_bps = link_bps
        self.step = 0
        self.resumed = ""
        self._scaler = scaler
        self._loss_scale = 1.0 if scaler is None else 0.0
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._buckets: dict[tuple[int, ...], Bucket] = {}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.core.residuals.world

    @property
    def steps_skipped(self) -> int:
        """Steps that no rank took because some rank's gradient held NaN or Inf; their gradients are all NaN."""
        return self.core.steps_skipped

    def counters(self) -> dict[str, float]:
        """Returns the sums so far: bytes, values and messages sent, and seconds by purpose."""
        return self.driver.counters()

    def close(self) -> None:
        """Ends the hook's threads. The model's backward pass cannot be used afterwards."""
        self.driver.close()

    # ---- for the hook

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

    def follow_loss_scale(self) -> None:
        """Keeps residuals in the units of this step's gradients."""
        if self._scaler is None:
            return
        scale = float(self._scaler.get_scale())
        if self._loss_scale not in (0.0, scale):
            self.core.residuals.scale(scale / self._loss_scale)
        self._loss_scale = scale

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of this rank's state: save it on every rank, since every rank's residual is another.

        Tensors, numbers and strings alone, under a key of this rank's own: `torch.save` into a file for each rank
        and `torch.distributed.checkpoint` into one folder both keep all of it.
        """
        self.driver.wait_step()
        return {
            "format": FORMAT,
            "world_size": self.world_size,
            "step": self.step,
            "loss_scale": self._loss_scale,
            "ranks": {str(self.core.residuals.rank): self.core.residuals.state_dict()},
        }

    def blank_state_dict(self, world_size: int) -> dict[str, Any]:
        """Returns a state of all ranks of a `world_size`-rank run, filled with zeros.

        `torch.distributed.checkpoint.load` fills what it is given: give it this to read a checkpoint that another
        number of ranks wrote, and pass the result to `load_state_dict`.
        """
        residuals = self.core.residuals
        return {
            "format": FORMAT,
            "world_size": world_size,
            "step": 0,
            "loss_scale": 1.0,
            "ranks": {str(rank): residuals.blank_state_dict(world_size) for rank in range(world_size)},
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
        self.driver.wait_step()
        ranks, old = state["ranks"], int(state["world_size"])
        residuals = self.core.residuals
        rank, world = residuals.rank, residuals.world
        if old == world:
            if str(rank) not in ranks:
                raise ConfigError(
                    f"the state is of rank {', '.join(ranks)} and this is rank {rank}: every rank has residuals of its "
                    "own; save state_dict() on every rank and load each one's"
                )
            residuals.load_state_dict(ranks[str(rank)])
            self.resumed = f"resumed at step {state['step']} with this rank's own residuals, bit for bit"
        else:
            missing = [other for other in range(old) if str(other) not in ranks]
            if missing:
                raise ConfigError(
                    f"the state was saved by {old} ranks and this run has {world}; the states of ranks {missing} are "
                    "missing: pass ddp.merge of all of them"
                )
            residuals.load_resized([ranks[str(other)] for other in range(old)])
            self.resumed = (
                f"resumed at step {state['step']} from {old} ranks on {world}: residuals were summed over the old "
                "ranks by parameter name and divided over the new ones"
            )
            _log.warning("%s", self.resumed)
        self.step = int(state["step"])
        self._loss_scale = float(state["loss_scale"])
        if self._scaler is None and self._loss_scale not in (0.0, 1.0):
            residuals.scale(1 / self._loss_scale)
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
