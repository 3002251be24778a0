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
from thinwire.policies.autopilot.memory import Hex, SavedState
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
"""Of a note: the setting's index, and a measurement of the link as the upper half of a float32; 0 where there is none.
What a worker measured of its last exchange follows, where there was one."""
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
    probed_s: float = 0.0


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
        level: index of the setting of the last exchange.
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
        self.pilot = Pilot(settings, self.work, lag_limit=design.auto.lag_limit, target=design.auto.target)
        self.level = self._noted = self.changed_at = self._exchanges = 0
        self._arrived: dict[int, bytes] = {}
        self._spent: dict[str, float] = {}
        self._before: dict[str, float] = {}
        self._began = 0.0
        self._probe = LinkProbe(self._remote, now)
        self._recode()

    @property
    def setting(self) -> Level:
        """Of the last exchange."""
        return self.pilot.levels[self.level]

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
        self.level = self.pilot.memory.level
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
        )
        return saved.state()

    def load_state(self, text: str) -> None:
        """Takes it back. Residuals have been loaded. Raises ConfigError where it cannot be that."""
        saved = _AutopilotState.from_state(text)
        self.pilot.load_state(saved.pilot)
        self.level, self._noted = (min(each, len(self.pilot.levels) - 1) for each in (saved.level, saved.noted))
        self.changed_at, self._exchanges = saved.changed_at, saved.exchanges
        self._arrived = {rank: bytes.fromhex(note) for rank, note in saved.arrived.items()}
        self._began, self._probe.taken_s = self._now() - saved.elapsed_s, saved.probed_s
        self._before = {name: self._counters[name] - spent for name, spent in saved.spent.items()}
        self._recode()

    def __str__(self) -> str:
        return self.pilot.describe(self.level, self.changed_at, "exchange")

    # ---- an exchange

    def _take(self, notes: Mapping[int, bytes]) -> None:
        """Takes what all workers said with the last exchange's pushes."""
        heads = {rank: _HEAD.unpack_from(note) for rank, note in sorted(notes.items()) if len(note) >= _HEAD.size}
        if not heads:
            return
        said = heads[min(heads)][0]
        if said != self.level and said < len(self.pilot.levels):  # the shards have gone by it
            self.pilot.memory.level = said
        measured = [notes[rank][_HEAD.size :] for rank in heads]
        if found := [unpack_note(note) for note in measured if len(note) == NOTE_NBYTES]:
            self.pilot.take(found, self._noted)
        if links := [link for _, upper in heads.values() if (link := _unpacked(upper))]:
            self.pilot.take_link(min(links))

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
