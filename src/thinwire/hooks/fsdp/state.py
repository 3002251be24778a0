"""The state of one rank's FSDP hook: the step under way, and residuals, which other shards and replicas can load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from thinwire.collective.core import Bucket
from thinwire.collective.cut import Cut, shards_of, whole_outstanding
from thinwire.collective.residuals import blank_state
from thinwire.collective.trained import TrainedTensor, partition
from thinwire.errors import TransportError
from thinwire.hooks.exchange.saved import Layout
from thinwire.hooks.exchange.state import ExchangeState
from thinwire.hooks.fsdp.parameter_groups import ParameterGroup
from thinwire.telemetry import Counters
from thinwire.transports.peers import PeerGroup


@dataclass(eq=False, slots=True)
class Ready:
    """A parameter group with the gradients that this step exchanges.

    Args:
        group: the parameter group.
        values: its gradients for the exchange; None if FSDP reduces them.
        factor: for their average.
    """

    group: ParameterGroup
    values: torch.Tensor | None
    factor: float
    made: Any = field(init=False, default=None)
    """On a GPU, an event on FSDP's stream after it has computed the values."""

    def __post_init__(self) -> None:
        if self.values is not None and self.values.is_cuda:
            self.made = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.made.record(torch.cuda.current_stream(self.values.device))

    def wait(self) -> None:
        """Makes the current stream wait for the values."""
        if self.made is not None:
            torch.cuda.current_stream(self.group.device).wait_event(self.made)


class Outcome(Enum):
    """The outcome of a step on one rank, from best to worst."""

    TAKEN = 0
    SKIPPED = 1
    FAILED = 2


class ShardedState(ExchangeState):
    """The state that `fsdp.compress` returns, an `ExchangeState`."""

    def __init__(
        self,
        *,
        buckets: Mapping[ParameterGroup, Bucket],
        wholes: Sequence[TrainedTensor],
        cuts: Mapping[str, Cut],
        everyone: PeerGroup,
        replica: int,
        replicas: int | None,
        shard: int,
        shards: int,
        shard_group: dist.ProcessGroup | None,
        gathered: str,
        **kept: Any,
    ) -> None:
        layouts = {name: Layout(cut.shape, tuple(range(len(cut.shape))), cut.dim) for name, cut in cuts.items()}
        super().__init__(layouts=layouts, **kept)
        self._buckets = buckets
        self._wholes = wholes
        self._cuts = cuts
        self._everyone = everyone
        self._replica, self._replicas = replica, replicas
        self._shard, self._shards = shard, shards
        self._shard_group = shard_group
        self.gathered = gathered
        self._ready: list[Ready] = []
        self._pass = -1
        self.gathers = Counters()

    @property
    def rank(self) -> int:
        """This rank's number in the mesh."""
        return self._replica * self._shards + self._shard

    @property
    def world_size(self) -> int:
        """Number of ranks of the mesh."""
        return (self._replicas or 1) * self._shards

    @property
    def everyone(self) -> PeerGroup:
        return self._everyone

    @property
    def uncounted_traffic(self) -> str:
        gathers = self._replicas is None and not self.gathers["gather_uncompressed_bytes"]
        return "FSDP gathers parameters uncompressed" if gathers else ""

    def counters(self) -> dict[str, float]:
        """Returns the sums so far: bytes, values and messages sent, and seconds by purpose."""
        return self._with_gathers(1.0)

    def compressed_sums(self) -> dict[str, float]:
        """Returns the sums of compressed steps, with an equal share of the gathers, which all steps make."""
        return self._with_gathers(self.driver.counters().get("steps", 0) / max(1, self.gathers["gather_steps"]))

    def _with_gathers(self, share: float) -> dict[str, float]:
        driven, gathered = self.driver.counters(), self.gathers.snapshot()
        return {key: driven.get(key, 0) + share * gathered.get(key, 0) for key in sorted({*driven, *gathered})}

    # ---- a step

    def compute_dtype(self, group: ParameterGroup) -> torch.dtype:
        """Returns the dtype in which a parameter group's gradients are exchanged."""
        return torch.float64 if group.parameters[0].dtype == torch.float64 else torch.float32

    @property
    def _exchanging(self) -> bool:
        """Whether an exchange of this step has begun; a group may have only padding on this rank."""
        return any(self._buckets[each.group].offsets for each in self._ready)

    def begin_forward(self) -> None:
        """Forgets an interrupted backward pass: FSDP's `reset_iter_state` discards its gradients."""
        self._ready = []
        for group in self._buckets:
            group.check_hooks()

    def begin(self, group: ParameterGroup, flat: torch.Tensor) -> bool:
        """Begins a step if these gradients of a parameter group are its first.

        Returns:
            Whether the gradients are compressed; if not, residuals are added to them.
        """
        auto, bucket = self.auto, self._buckets[group]
        if auto is not None and bucket.offsets:
            if any(group is each.group for each in self._ready):
                self.end_step()
            if not self._exchanging:
                self.restore_discarded()
                self.begin_step()
            auto.bucket_ready()
            if auto.flush.waiting and not auto.compressed:
                waiting = torch.zeros(flat.numel(), dtype=self.compute_dtype(group), device=flat.device)
                auto.flush.add(bucket, waiting)
                group.add_waiting(flat, waiting)
        return self.compresses

    def reduced(self, begun: float, averages: torch.Tensor) -> None:
        """Records an uncompressed reduction that began at `begun`, in seconds of `time.perf_counter`."""
        if self.auto is None:
            return
        if not averages.is_cuda:  # on a GPU it was only queued
            self.auto.exposed(begun)
        self.auto.flush.reduced(averages)

    def gradient_ready(self, ready: Ready) -> None:
        """Accepts a parameter group's gradients in the backward pass, and returns at once.

        The newest group waits for the next one, because FSDP does not mark the last group of a step.
        """
        if any(ready.group is each.group for each in self._ready):
            self.end_step()  # a group that is reduced twice in a backward pass makes two exchanges
        if not self._ready:
            if self.auto is None:  # with a controller, `begin` does this before it uses residuals
                self.restore_discarded()
                self.follow_loss_scale()
            if ready.values is not None:
                self.note_compressed()
        if self._buckets[ready.group].offsets:
            self._exchange_newest(last=False)
        self._ready.append(ready)

    def end_step(self) -> None:
        """Exchanges the newest group, waits for the whole step, and adds the averages to the parameters' gradients.

        It has no effect if no gradients were reduced since the last step. A single rank reduces none: its backward pass
        is a step if several ranks would reduce gradients in it.
        """
        ready, skipped = self._ready, self.core.steps_skipped
        # The number of the backward pass, private in torch: several roots may end the same pass.
        before, self._pass = self._pass, torch._C._current_graph_task_id()
        if not ready:
            if self.world_size == 1 and self._pass != before and any(group.reduces for group in self._buckets):
                self.step += 1
                self.between_steps()
            return
        own, failure, exchanged = Outcome.TAKEN, None, self._exchanging
        try:
            for each in ready:
                each.wait()
                # Before the newest is exchanged: FSDP's stream may have rescaled its residuals.
                each.group.wait_reduced()
            self._exchange_newest(last=True)
            self._ready = []
            self.driver.wait_step()
            undone = self.auto is not None and self.auto.flush.check_finite()
            if undone or self.core.steps_skipped > skipped:
                own = Outcome.SKIPPED
        except Exception as error:  # the ranks of the other shards must learn of every error
            own, failure = Outcome.FAILED, error
        worst = self._worst(own, ready[0].group.device)
        if failure is not None:
            raise failure
        if worst is Outcome.FAILED:
            raise TransportError("a rank of another shard failed, and reports its error; start all ranks again")
        if worst is Outcome.SKIPPED:
            self._skip(ready, own, exchanged=exchanged)
        for each in ready:
            if each.values is not None:
                each.group.add_gradient(each.group.own(each.values).mul_(each.factor))
        self.step += 1
        self.gathers.add("gather_steps", 1)
        self.between_steps()

    def _skip(self, ready: Sequence[Ready], own: Outcome, *, exchanged: bool) -> None:
        """Sets all of a step's gradients to NaN and restores residuals, because some shard skips the step."""
        if self.auto is not None and not self.auto.compressed:
            self.auto.flush.skip()
        elif own is Outcome.TAKEN:
            self.core.skip_step(exchanged=exchanged)
        for each in ready:
            if each.values is not None:
                each.values.fill_(torch.nan)
            else:
                each.group.fill_gradient(torch.nan)

    def _exchange_newest(self, *, last: bool) -> None:
        """Exchanges the newest gradients, unless this rank has only padding, of a group with fewer rows than ranks."""
        held = [each for each in self._ready if self._buckets[each.group].offsets]
        if held and (values := held[-1].values) is not None:
            held[-1].wait()
            self.driver.bucket_ready(self._buckets[held[-1].group], values, self.step, len(held) - 1, last=last)

    def _worst(self, own: Outcome, device: torch.device) -> Outcome:
        """Returns the worst outcome of all shards, because ranks of different shards do not see each other's averages.

        NaN may be in only one shard's gradients, and all shards must skip the step together. A compressed step without
        replicas does not need this: its exchange includes all ranks.
        """
        exchanged = self._replicas is None and (self.auto is None or self.auto.compressed)
        if self._shard_group is None or exchanged:
            return own
        worst = torch.tensor(own.value, device=device)
        try:
            work = dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self._shard_group, async_op=True)
            work.wait(2 * self._everyone.timeout)  # a rank that waits for a replica comes after one timeout
        except RuntimeError as error:
            if own is not Outcome.FAILED:  # a failed rank raises its own error
                raise TransportError(
                    f"the ranks of the other shards did not report the outcome of a step: {error}"
                ) from error
        return Outcome(int(worst.item()))

    # ---- checkpoints

    def layout(self) -> dict[str, int]:
        """Returns the division into ranks; 0 replicas: a mesh of one dimension."""
        return {"world_size": self.world_size, "replicas": self._replicas or 0}

    def blank_state_dict(self, world_size: int, *, replicas: int | None = None) -> dict[str, Any]:
        """Returns a state of all ranks of another run, filled with zeros.

        `torch.distributed.checkpoint.load` fills a given state in place. Give it this to read a checkpoint that a mesh
        of another shape wrote, and pass the result to `load_state_dict`.

        Args:
            world_size: number of ranks of that mesh.
            replicas: length of its first dimension if it had two; None if it had one.
        """
        shards = world_size // (replicas or 1)
        if replicas is None:
            cuts = {name: cut.partitions(shards) for name, cut in self._cuts.items()}
            parts = [blank_state(self._wholes, cuts) for _ in range(world_size)]
        else:
            held = [shards_of(self._wholes, self._cuts, shards, rank % shards) for rank in range(world_size)]
            parts = [blank_state(tensors, partition(tensors, replicas)) for tensors in held]
        blank = {rank: {"auto": "", **part} for rank, part in enumerate(parts)}
        return self._saved({"world_size": world_size, "replicas": replicas or 0}, blank)

    def _owned_alike(self, part: Mapping[str, Any]) -> bool:
        cut_alike = all(_cut_of(part, name, cut) == cut.dim for name, cut in self._cuts.items())
        return cut_alike and super()._owned_alike(part)

    def load_resized(self, state: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> None:
        """Loads the residuals of a mesh of another shape, or one that cut tensors along other dimensions."""
        cuts = {name: replace(cut, dim=_cut_of(ranks[0], name, cut)) for name, cut in self._cuts.items()}
        totals = whole_outstanding(self._wholes, cuts, ranks, replicas=int(state["replicas"]) or None)
        shards = range(self._shards) if self._replicas is None else [self._shard]
        self.core.residuals.load_outstanding(
            {
                name: torch.cat(
                    [torch.from_numpy(self._cuts[name].of(whole, self._shards, shard)).flatten() for shard in shards]
                ).numpy()
                for name, whole in totals.items()
                if name in self.core.residuals.tensors
            }
        )


def _cut_of(part: Mapping[str, Any], name: str, cut: Cut) -> int:
    """Returns the dimension along which a rank's state cuts a tensor; if it lacks the tensor, this run's."""
    layout = part["layouts"].get(name)
    return cut.dim if layout is None else int(layout[0])
