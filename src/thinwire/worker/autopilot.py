"""`codec="auto"` at a worker with local updates: measures every exchange, tells the others, and chooses the next one's.

What was measured of exchange k travels with the pushes of exchange k + 1, comes back from a shard with its answer, and
decides exchange k + 2: all workers have the same numbers by then, and decide the same. Shards code what they send by
what the lowest rank says with its push, so whoever joined late, and knows less, follows that rank.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from thinwire.policies.autopilot.costs import Workload
from thinwire.policies.autopilot.levels import Level
from thinwire.policies.autopilot.memory import Hex, Memory, SavedState
from thinwire.policies.autopilot.notes import NOTE_NBYTES, StepNote, pack_note, unpack_note
from thinwire.policies.autopilot.pilot import Pilot
from thinwire.policies.designs import Design
from thinwire.telemetry import Counters
from thinwire.worker.conversation import Conversation
from thinwire.worker.effects import Procedure
from thinwire.worker.link_probe import LinkProbe
from thinwire.worker.model import WorkerTensor

_SAMPLE = 1 << 16
"""Values of one tensor whose change stands for all of them."""
_HEAD = struct.Struct("<B2s")
"""Of a note: the setting's number, and a measurement of the link as the upper half of a float32; 0 where there is none.
What a worker measured of its last exchange follows, where there was one. Where its device has no kernels for some
settings, a last byte has their bits."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServedWorkload(Workload):
    """What is exchanged with shards: a worker sends its values, and gets as many.

    Where it serves a shard itself, its own values take no link, and what the others get of it does.

    Args:
        shards: how many it reaches over a link.
        share: of its values, what these hold.
    """

    shards: int
    share: float

    @property
    def messages(self) -> int:
        return 2 * self.shards

    @property
    def passes(self) -> float:
        return 2 * self.share


class _AutopilotState(SavedState):
    """What travels with a checkpoint beside the residuals."""

    asked_as = "codec=auto"

    pilot: str
    level: int
    noted: int
    changed_at: int
    exchanges: int
    elapsed_s: float
    spent: dict[str, float]
    arrived: dict[int, Hex]
    probed_s: float
    left_out: int


class RoundAutopilot:
    """The settings of one worker's exchanges.

    Args:
        design: with `auto`.
        tensors: the worker's.
        conversations: one for each shard.
        rank, workers: this worker, and how many there are.
        own_shard: the shard that this worker's process serves, which takes no link; None where servers are apart.
        counters: of the worker.
        now: returns a time in seconds.

    Attributes:
        pilot: the controller.
        level: number of the setting of the last exchange: its place among all settings, on any device.
    """

    def __init__(
        self,
        design: Design,
        tensors: Sequence[WorkerTensor],
        conversations: Sequence[Conversation],
        *,
        rank: int,
        workers: int,
        own_shard: int | None,
        counters: Counters,
        now: Callable[[], float],
    ) -> None:
        assert design.auto is not None
        self._rank, self._counters, self._now = rank, counters, now
        self._conversations, self._up, self._down = conversations, design.up, design.down
        tables = [table for tensor in tensors for table in tensor.tables if table.context is not None]
        contexts = [table.context for table in tables if table.context is not None]
        self._contexts = [context for context in contexts if context.codec == design.up]
        self._sampled = next((t for t in tensors if t.tables[0].context in self._contexts), None)
        self._remote = [each for each in conversations if each.shard != own_shard and each.plan.tables]
        # It passes notes on; any would, as long as it is the same for all workers.
        self._relay = conversations[tensors[0].tables[0].shard]
        plain = [each for each in tables if each.context not in self._contexts]
        self._share = 1.0 if own_shard is None else (workers - 1) / workers
        self.work = ServedWorkload(
            coded=sum(context.size for context in self._contexts),
            # In units of four bytes, which is what the model has them take.
            plain=sum(each.values.numel() * (2 if each.is_narrow else 4) for each in plain) // 4,
            ranks=workers,
            groups=1,
            uncompressed_nbytes=sum(4 * each.values.numel() for each in tables),
            shards=len(self._remote),
            share=self._share,
        )
        devices = {context.device for context in self._contexts}
        settings = design.auto.settings(devices)
        # What is told of a setting is its place among all, the same on every device.
        self._all = design.auto.settings()
        self._lacking = sum(1 << number for number, level in enumerate(self._all) if level not in settings)
        self._left_out = self._lacking
        self.pilot = Pilot(settings, self.work, lag_limit=design.auto.lag_limit, target=design.auto.target)
        self.level = self._noted = self._all.index(settings[0])
        self.changed_at = self._exchanges = 0
        self._arrived: dict[int, bytes] = {}
        self._spent: dict[str, float] = {}
        self._before: dict[str, float] = {}
        self._began = 0.0
        self._probe = LinkProbe(self._remote, now)
        self._recode()

    @property
    def setting(self) -> Level:
        """Of the last exchange."""
        return self._all[self.level]

    def begin(self) -> Procedure[bool]:
        """Decides the setting of the exchange that now begins; returns whether codecs have changed.

        All answers to the last exchange are in.
        """
        notes, self._relay.notes = self._relay.notes or self._arrived, {}
        self._arrived = {}
        if notes:
            self._take(notes)
        note, link = self._note(), 0.0
        self._probe.taken_s = 0.0
        if self.pilot.wants_probe and self._remote:
            link = yield from self._probe.measure(self.pilot)
        before, self._noted = self.level, self.level
        self.level = self._all.index(self.pilot.setting)
        if self.level != before:
            self.changed_at = self._exchanges
            self._recode()
        self._ask()
        self._tell(link, note)
        for line in self.pilot.news():
            if self._rank == 0:
                _log.info("auto, exchange %d: %s", self._exchanges, line)
        self._exchanges += 1
        self._before, self._began = self._counters.snapshot(), self._now()
        return self.level != before

    # ---- checkpoints and reports

    def state(self) -> str:
        """Returns the controller's state, for an exact resume; call it once all answers are in."""
        saved = _AutopilotState(
            pilot=self.pilot.state(),
            level=self.level,
            noted=self._noted,
            changed_at=self.changed_at,
            exchanges=self._exchanges,
            elapsed_s=self._now() - self._began if self._exchanges else 0.0,
            spent=self._since(),
            arrived={rank: note.hex() for rank, note in (self._relay.notes or self._arrived).items()},
            probed_s=self._probe.taken_s,
            left_out=self._left_out,
        )
        return saved.state()

    def load_state(self, text: str) -> None:
        """Takes it back. Residuals have been loaded. Raises ConfigError where it cannot be that."""
        saved = _AutopilotState.from_state(text)
        memory = Memory.from_state(saved.pilot)
        self._leave_out(saved.left_out)
        numbers = [number for number in range(len(self._all)) if not saved.left_out >> number & 1] or [0]
        memory.level = self._place(numbers[min(memory.level, len(numbers) - 1)])  # another device may have other places
        self.pilot.load(memory)
        self.level, self._noted = (min(each, len(self._all) - 1) for each in (saved.level, saved.noted))
        self.changed_at, self._exchanges = saved.changed_at, saved.exchanges
        self._arrived = {rank: bytes.fromhex(note) for rank, note in saved.arrived.items()}
        self._began, self._probe.taken_s = self._now() - saved.elapsed_s, saved.probed_s
        self._before = {name: self._counters[name] - spent for name, spent in saved.spent.items()}
        self._recode()

    def __str__(self) -> str:
        return self.pilot.describe(self._place(self.level), self.changed_at, "exchange")

    # ---- an exchange

    def _take(self, notes: Mapping[int, bytes]) -> None:
        """Takes what all workers said with the last exchange's pushes."""
        heads = {rank: _HEAD.unpack_from(note) for rank, note in sorted(notes.items()) if len(note) >= _HEAD.size}
        if not heads:
            return
        rests = [notes[rank][_HEAD.size :] for rank in heads]
        for lacking in (rest[-1] for rest in rests if len(rest) in (1, NOTE_NBYTES + 1)):
            self._leave_out(lacking)
        said = heads[min(heads)][0]
        if said < len(self._all) and self.pilot.levels[self._place(said)] != self.setting:  # the shards have gone by it
            self.pilot.memory.level = self._place(said)
        measured = [rest[:NOTE_NBYTES] for rest in rests if len(rest) in (NOTE_NBYTES, NOTE_NBYTES + 1)]
        if measured:
            self.pilot.take([unpack_note(note) for note in measured], self._place(self._noted))
        if links := [link for _, upper in heads.values() if (link := _unpacked(upper))]:
            self.pilot.take_link(min(links))

    def _leave_out(self, lacking: int) -> None:
        """Chooses no more among settings for which some worker has no kernels, bits by number; unless that is all."""
        every = (1 << len(self._all)) - 1
        if (left_out := self._left_out | lacking & every) not in (self._left_out, every):
            self._left_out = left_out
            self.pilot.leave_out({level.name for number, level in enumerate(self._all) if lacking >> number & 1})

    def _place(self, number: int) -> int:
        """Returns where the pilot has a setting; for one that is left out, the next stronger one, or the strongest."""
        places = (place for place, level in enumerate(self.pilot.levels) if self._all.index(level) >= number)
        return next(places, len(self.pilot.levels) - 1)

    def _note(self) -> StepNote | None:
        """Returns what the last exchange, and the steps since, have taken; None before the first."""
        if not self._exchanges:
            return None
        spent = self._since()
        sent = spent["payload_bytes_push"] + spent["payload_bytes_pull"]
        heads = self.work.nbytes(self.setting, 0.0) - 4 * self.work.passes * self.work.plain
        return StepNote(
            step_s=max(0.0, self._now() - self._began),
            exposed_s=max(spent["wait_seconds"], spent["exchange_seconds"] - self._probe.taken_s),
            overlap_s=0.0,
            link_s=spent["wait_seconds"],
            codec_s=spent["encode_seconds"] + spent["decode_seconds"],
            sent_nbytes=heads + self._share * sent,
            lag=max((each.lag_bound.lag for each in self._contexts if each.lag_bound is not None), default=0.0),
            norm=self._log_norm(),
        )

    def _since(self) -> dict[str, float]:
        """What the last exchange has added to the counters."""
        return {name: self._counters[name] - self._before.get(name, 0.0) for name in _MEASURED}

    def _log_norm(self) -> float:
        """log₂ of the norm of some of what the steps since the last exchange have changed; NaN where none is found."""
        if self._sampled is None or not self._sampled.values.is_cpu:
            return math.nan
        part = slice(0, _SAMPLE)
        changed = self._sampled.values[part] - self._sampled.local[part]
        if (offset := self._sampled.held_back()) is not None:
            changed -= offset[part]
        norm = float(changed.norm())
        return math.log2(norm) if 0 < norm < math.inf else math.nan

    def _recode(self) -> None:
        """Gives contexts the setting's codec; what waits in their residuals is sent with it."""
        setting = self.setting
        assert setting.codec is not None
        codec = replace(setting.codec, nonfinite=self._up.nonfinite)
        for context in self._contexts:
            context.codec = codec

    def _ask(self) -> None:
        """Sets the largest multiplier of the bounds on the lag.

        Not before an exchange begins: a bound that is loaded is cut to the largest multiplier that it has been asked
        for, and a state is loaded before its setting is known.
        """
        for context in self._contexts:
            if context.lag_bound is not None:
                context.lag_bound.ask(self.setting.sparsity)

    def _tell(self, link: float, note: StepNote | None) -> None:
        """Says with the next pushes what codec the exchange has, and to the shard that passes it on, the note."""
        setting = self.setting
        assert setting.codec is not None
        told = _HEAD.pack(self.level, _packed(link)) + (b"" if note is None else pack_note(note))
        told += bytes([self._lacking]) if self._lacking else b""
        for conversation in self._conversations:
            codecs = conversation.plan.codecs
            conversation.transmit.tune(
                replaced=codecs.index(self._down.config()),
                codec=codecs.index(setting.codec.config()),
                sparsity=setting.sparsity,
                note=told if conversation is self._relay else b"",
            )


_MEASURED = (
    "exchange_seconds",
    "wait_seconds",
    "encode_seconds",
    "decode_seconds",
    "payload_bytes_push",
    "payload_bytes_pull",
)
"""Counters that a note is made of."""


def _packed(number: float) -> bytes:
    return struct.pack(">f", min(number, 1e30))[:2]


def _unpacked(upper: bytes) -> float:
    [number] = struct.unpack(">f", upper + bytes(2))
    return float(number)
