"""The tables of one plan: what each worker has of them, and how an update of theirs is made and sent.

Each answer is encoded once for all workers with the same copy. It knows workers by rank, and nothing of
peers, sessions, or who is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from thinwire.codecs.decoding import CheckedFrame
from thinwire.codecs.flats import Flats
from thinwire.codecs.scheme import stream_seed
from thinwire.codecs.tensor_set import Checked, TensorSet
from thinwire.codecs.tensors import FloatArray
from thinwire.collective.membership import Membership
from thinwire.collective.owned_shard import OwnedShard
from thinwire.errors import ConfigError, FrameError, ProtocolError
from thinwire.optimizers.options import Options, Settings, changes
from thinwire.optimizers.runner import OptimizerRunner
from thinwire.packets import EncodedTensor, portions
from thinwire.policies.consistency import consistency
from thinwire.schema import Ahead, Delta, Message, Plan, Values
from thinwire.server.agreement import usable_codecs
from thinwire.server.downlinks import ModelDelta
from thinwire.server.table import Table


class CannotGoOn(Exception):
    """A step can never be complete, or was not made whole: the training must stop; no peer broke the protocol."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message for one worker, or (rank None) for all that are there."""

    message: Message
    frames: tuple[EncodedTensor, ...] = ()
    rank: int | None = None


class TableUpdates:
    """The tables of a plan.

    Args:
        plan: checked already.
        least: with fewer workers no update is made; by default as many as the policy asks for.

    Raises:
        ProtocolError: codecs or an optimizer that cannot be used, or tables that do not fit the memory.
    """

    def __init__(self, plan: Plan, least: int | None = None) -> None:
        codecs = usable_codecs(plan)
        self.plan = plan
        self.terms = consistency(plan.consistency).terms(plan.workers, elastic=least is not None)
        self.members = Membership(plan.workers, self.terms.quorum, least)
        told = plan.settings.get("seed")
        seed = stream_seed(told if isinstance(told, int) else 0, None)
        try:
            self.tables = [
                Table(
                    *(spec, codecs[spec.up], codecs[spec.down], self.terms, plan.downlink, plan.reduce_of(spec), seed),
                    momentum=plan.momentum_of(spec),
                )
                for spec in plan.tables
            ]
        except (MemoryError, RuntimeError) as error:  # NumPy's and torch's ways to say so
            raise ProtocolError(f"the tables do not fit the server's memory: {error}") from error
        self.exchanges: dict[int, list[int]] = {}
        """Where every push is an update: by rank, of how many exchanges each table has had the worker's gradient."""
        self.final: int | None = None
        """The version with which the training ends, once worker 0 has announced it."""
        self._optimizer: OptimizerRunner | None = None
        trained = [(table.spec.group, table.values) for table in self.tables if not table.spec.state]
        if trained:
            self._optimizer = OptimizerRunner(plan.optimizer, self._stepped_by(plan.groups), trained)
        self._indices = [index for index, table in enumerate(self.tables) if not table.spec.state]
        self._trained = [self.tables[index] for index in self._indices]
        self._values = Flats.of([table.downlink.values for table in self._trained] or [np.empty(0, np.float32)])
        deltas = [table.downlink for table in self._trained if isinstance(table.downlink, ModelDelta)]
        self._pulls = TensorSet(
            [each.pulls for each in deltas], [p for p, each in enumerate(deltas) if each.is_batched]
        )
        """Of all that gradients change where the server updates the model; else empty."""
        batched = [place for place, table in enumerate(self._trained) if table.is_batched]
        self._pushes = TensorSet([table.pushes for table in self._trained], batched)
        self.shard = self._new_shard()
        """The gradients that come in. Buffers have no place in it."""

    def _stepped_by(self, groups: tuple[Options, ...]) -> tuple[Options, ...]:
        """Returns the options of the shard's own steps: without the momentum that each end adds itself."""
        if self.plan.downlink != "momentum":
            return groups
        return tuple({**group, "momentum": 0.0, "nesterov": False} for group in groups)

    def _new_shard(self) -> OwnedShard:
        tables = self._trained
        return OwnedShard(
            self._pushes,
            Flats.of([table.sum for table in tables] or [np.empty(0, np.float32)]),
            self.members,
            clocks=[table.version for table in tables],
            means={
                p: table.reduce.startswith("clipped") for p, table in enumerate(tables) if "senders" in table.reduce
            },
            over=[table.reduce == "sum" for table in tables],
            blame=lambda rank, error: FrameError(f"the gradient of worker {rank}: {error}"),
        )

    # ---- where everything stands

    @property
    def step(self) -> int:
        """Updates that every parameter has had. Buffers, which travel more rarely, do not count."""
        return min((table.version for table in self.tables if not table.spec.state), default=0)

    @property
    def newest(self) -> int:
        """Updates that some parameter has had, and none has had more."""
        return max((table.version for table in self.tables if not table.spec.state), default=0)

    def count_as(self, step: int) -> None:
        """Counts the updates of every parameter as so many, at least `newest`."""
        for table in self.tables:
            if not table.spec.state:
                table.version = step

    # ---- what workers have

    def assign(self, first: int, message: Values, frames: tuple[EncodedTensor, ...]) -> None:
        """Takes initial values: of some tables, the first of which is to be `first`."""
        end = first + len(frames)
        if not frames or message.tables != tuple(range(first, end)) or end > len(self.tables):
            came = f"of tables {message.tables} in {len(frames)} frames"
            raise ProtocolError(f"initial values came {came}, after {first} of {len(self.tables)} tables")
        for table, frame in zip(self.tables[first:end], frames, strict=True):
            table.assign(frame, 0)

    def check_versions(self, rank: int, have: Sequence[int]) -> tuple[int, ...]:
        """Returns the version of each table that a worker has which joins late, or resumes; −1 where it has nothing.

        Args:
            rank: whose.
            have: what it says; of another number of tables, that it has nothing.

        Raises:
            ProtocolError: it is ahead of the shard, or lacks updates that are not to be had any more.
        """
        versions = tuple(have) if len(have) == len(self.tables) else (-1,) * len(self.tables)
        for table, version in zip(self.tables, versions, strict=True):
            if version > table.version:
                raise ProtocolError(
                    f"worker {rank} has version {version} of {table.spec.name!r}, and this shard was resumed at "
                    f"version {table.version}: resume all workers and shards from the same step"
                )
            unknown = self.plan.downlink == "gradient" and not table.spec.state and table.version > 0
            if unknown and version < table.version:
                raise ProtocolError(
                    f"worker {rank} has version {max(0, version)} of {table.spec.name!r} and the others "
                    f"{table.version}; under this design the workers hold the model, and the server cannot give it to "
                    "one that begins or comes back late: resume all workers and shards from the same step"
                )
        return versions

    def catch_up(self, rank: int, have: Sequence[int]) -> list[Outgoing]:
        """Returns the whole tables that a worker lacks which joins late, or resumes.

        Args and Raises: as for `check_versions`.
        """
        versions = self.check_versions(rank, have)
        lacks = [
            i for i, table in enumerate(self.tables) if versions[i] < table.version or not self.terms.has_common_clock
        ]
        if not lacks:
            return []
        give = Table.hand_over if self.terms.immediate else Table.snapshot
        frames = [give(self.tables[i], rank) for i in lacks]
        outgoing = []
        led = [i for i in lacks if self.tables[i].momentum is not None]
        for anchor in (True, False):
            own = [self.tables[i].momentum_frame(anchor=anchor) for i in led]
            outgoing += [
                Outgoing(Ahead(tables=tuple(led[part]), anchor=anchor), tuple(own[part]), rank)
                for part in portions(own)
            ]
        for part in portions(frames):
            values = Values(tables=tuple(lacks[part]), versions=tuple(self.tables[i].version for i in lacks[part]))
            outgoing.append(Outgoing(values, tuple(frames[part]), rank))
        return outgoing

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Tables, versions, copies, residuals and the optimizer's state, where every parameter has one version.

        Gradients that came for the next version are not in it, nor are changed rates and options: workers
        that go on from here send both again. Where every push is an update by itself, any moment will do.

        Raises:
            ConfigError: updates are made of several pushes, and tables have different versions.
        """
        versions = {table.version for table in self.tables if not table.spec.state}
        if len(versions) > 1 and self.terms.has_common_clock:
            raise ConfigError(
                f"consistency {self.plan.consistency}: tables have versions {sorted(versions)}; a checkpoint is taken "
                "where all have one"
            )
        return {
            "exchanges": {rank: list(each) for rank, each in self.exchanges.items()},
            "final": self.final,
            "memberships": self.members.history,
            "tables": [table.state_dict() for table in self.tables],
            "updater": None if self._optimizer is None else self._optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self.final = state["final"]
        self.exchanges = {rank: list(each) for rank, each in state["exchanges"].items()}
        for table, saved in zip(self.tables, state["tables"], strict=True):
            table.load_state_dict(saved)
        if self.terms.lockstep and self.step:  # buffers may have been on their way: no worker sends them again
            due = (self.step - 1) // self.plan.state_interval * self.plan.state_interval
            for table in (each for each in self.tables if each.spec.state):
                table.version = max(table.version, due + 1)
        self.shard = self._new_shard()
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state["updater"])
        self.members.history = tuple((clock, tuple(ranks)) for clock, ranks in state["memberships"])
        self.members.divide_data(self.step)  # workers that were gone are waited for again

    # ---- updates

    def _check(self, places: Sequence[int], frames: Sequence[EncodedTensor]) -> tuple[list[Checked], list[int]]:
        """Checks one frame for each of some trained tables.

        Returns:
            The gradients to add, and the places of those that their sender refused: they were not finite.

        Raises:
            ProtocolError: a frame is no gradient of its table, in the codec that was agreed on.
        """
        try:
            checked = self._pushes.at(places).check(frames)
        except FrameError as error:
            raise ProtocolError(str(error)) from error
        refused = []
        for place, frame, each in zip(places, frames, checked, strict=True):
            table = self._trained[place]
            if isinstance(each, CheckedFrame):
                if each.frame.codec != (agreed := table.pushes.codec.id):
                    raise ProtocolError(f"{table.spec.name}: codec {each.frame.codec!r} came, {agreed!r} was agreed on")
                table.scale = each.frame.scales[0] if each.frame.scales else table.scale
            elif each is None and len(frame):
                refused.append(place)
        return checked, refused

    def _update(self, places: Sequence[int], settings: Settings, rank: int | None = None) -> list[Outgoing]:
        """Updates each of these trained tables once; those that took the same turn share a message.

        Args:
            places: of the tables.
            settings: rates and options of the update.
            rank: of the worker whose push alone is the update, and who alone is led to it; None leads all workers.
        """
        here = self.plan.shard_steps  # the optimizer runs here, and no worker need know
        messages: dict[tuple[int, int, tuple[int, ...]], list[tuple[int, EncodedTensor]]] = {}
        targets = None if rank is None else {rank}
        taken = self.shard.pop_means(places)
        changed = [place for place, each in zip(places, taken, strict=True) if each.num_added]
        if here:
            self._step([self._trained[place] for place in changed], settings)
        made = self._encode_together(changed, targets) if here else {}
        for place, each in zip(places, taken, strict=True):
            table = self._trained[place]
            table.downlink.senders = each.num_added or table.downlink.senders
            base, some = (-1, each.ranks) if rank is None else (table.given[rank], (rank,))
            sent = table.publish(table.sum if each.num_added else None, targets, made=made.get(place))
            messages.setdefault((table.version, base, some), []).append((self._indices[place], sent))
        self.shard.add_in_turn()
        all_ranks = tuple(range(self.plan.workers)) if self.members.highest < self.plan.workers else None
        outgoing: list[Outgoing] = []
        for (version, base, ranks), frames in messages.items():
            # The forward pass needs the first tables first.
            frames.sort(key=lambda each: each[0])
            for part in portions([frame for _, frame in frames]):
                delta = Delta(
                    version=version,
                    base=base,
                    tables=tuple(index for index, _ in frames[part]),
                    last=self.final is not None and (rank is not None or version >= self.final),
                    ranks=() if rank is None and ranks == all_ranks else ranks,
                    rates=() if here else settings.rates,
                    options=() if here else changes(self.plan.groups, settings.groups),
                )
                outgoing.append(Outgoing(delta, tuple(frame for _, frame in frames[part]), rank))
        return outgoing

    def _step(self, tables: Sequence[Table], settings: Settings) -> None:
        """Updates the model by the means of some tables."""
        assert self._optimizer is not None
        try:
            self._optimizer.set(Settings(settings.rates, self._stepped_by(settings.groups)))
            self._optimizer.step([table.values for table in tables], [table.gradient for table in tables])
        except (ProtocolError, ConfigError):
            raise
        except Exception as error:  # torch raises anything; some tables may be updated, and others not
            raise CannotGoOn(f"{self.plan.optimizer} failed at step {self.step}: {error}") from error

    def _encode_together(self, places: Sequence[int], ranks: set[int] | None) -> dict[int, EncodedTensor]:
        """Encodes the difference between some trained tables and workers' copies, and updates these copies.

        Returns:
            Frames by place, without those that `Table.publish` must make: of tables that go one by one, or that hold
            NaN or Inf.
        """
        if not places:
            return {}
        deltas = [each for p in places if isinstance(each := self._trained[p].downlink, ModelDelta)]
        copies = [each.copies.move(ranks or each.copies.owners) for each in deltas]
        values = self._values.at(places)
        made = self._pulls.at(places).encode_together(
            values,
            _placed([copy.base_address for copy in copies], [copy.base for copy in copies], values),
            outs=_placed([copy.address for copy in copies], [copy.values for copy in copies], values),
            bounds=[copy.lag for copy in copies],
        )
        for delta, copy, frame in zip(deltas, copies, made, strict=True):
            if frame is not None:
                delta.sent(copy)
        return {place: frame for place, frame in zip(places, made, strict=True) if frame is not None}


def _placed(addresses: Sequence[int], arrays: Sequence[FloatArray], like: Flats) -> Flats:
    return Flats(np.array(addresses, np.int64), like.sizes, arrays[0], lambda: [each.reshape(-1) for each in arrays])
