"""The controller of local updates: what it tells, whom it follows, and what it takes up again."""

from __future__ import annotations

import struct
from collections.abc import Collection

import pytest
import torch

from thinwire.errors import ConfigError
from thinwire.hooks.planning import make_plan
from thinwire.optimizers.options import ParameterGroups
from thinwire.policies.auto_codec import AutoCodec
from thinwire.policies.autopilot.levels import Level
from thinwire.policies.autopilot.notes import NOTE_NBYTES, unpack_note
from thinwire.policies.designs import design as find_design
from thinwire.schema import Echo, TunedPush
from thinwire.worker.effects import Procedure, Receive, Send
from thinwire.worker.local_updates import LocalWorker


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def worker(name: str = "update[codec=auto]", rank: int = 1) -> tuple[LocalWorker, Clock]:
    torch.manual_seed(0)
    model, clock, design = torch.nn.Linear(200, 100), Clock(), find_design(name)
    optimizer = torch.optim.AdamW(model.parameters())
    planned = make_plan(model, optimizer, design, workers=3)
    assert design.local is not None
    outer = design.local.outer_groups()
    groups = ParameterGroups("SGD", outer, outer[0])
    return LocalWorker(planned.plans, planned.tensors, design, groups, rank=rank, now=clock), clock


def exchange(made: LocalWorker, clock: Clock, bps: float, notes: dict[int, bytes] | None = None) -> TunedPush:
    """Runs one exchange's beginning against a shard that echoes at a rate both ways; returns its first push."""
    assert made.auto is not None
    [shard] = made.conversations
    shard.notes = notes or {}
    run(made.auto.begin(), made, clock, bps)
    shard.push(0, 0, b"frame")
    shard.transmit.end_step()
    [sent] = run(shard.flush(0, (1.0,)), made, clock, bps)
    assert isinstance(sent.message, TunedPush)
    return sent.message


def run(procedure: Procedure[object], made: LocalWorker, clock: Clock, bps: float) -> list[Send]:
    sent: list[Send] = []
    for effect in procedure:
        if isinstance(effect, Send) and isinstance(effect.message, Echo):
            clock.now += 2 * 8 * len(effect.frames[0]) / bps
            made.conversations[0].received(effect.message, effect.frames)
        elif isinstance(effect, Send):
            sent.append(effect)
        else:
            assert not isinstance(effect, Receive), "the echo is there"
    return sent


def test_the_first_exchange_measures_the_link_and_the_next_one_goes_by_it() -> None:
    made, clock = worker()
    plan = made.conversations[0].plan
    first = exchange(made, clock, 1e6)
    assert plan.codecs[first.codec]["id"] == "bf16", "nothing is known yet"
    assert plan.codecs[first.replaced]["id"] == "3lc"
    link = struct.unpack(">f", first.note[1:3] + bytes(2))[0]
    assert link == pytest.approx(1e6, rel=0.01)
    assert len(first.note) == 3, "there was no exchange to tell of"
    clock.now += 0.01
    second = exchange(made, clock, 1e6, dict.fromkeys(range(3), first.note))
    assert plan.codecs[second.codec]["id"] == "3lc"
    assert (second.note[0], len(second.note)) == (made.auto.level if made.auto else 0, 3 + NOTE_NBYTES)
    assert made.auto is not None
    assert {context.codec.id for context in made.auto._contexts} == {"3lc"}


def test_what_a_measurement_of_the_link_took_is_left_out_of_its_own_exchange_alone() -> None:
    made, clock = worker()
    note = exchange(made, clock, 1e6).note
    assert made.auto is not None
    probed_s = clock.now
    exposed = []
    for seconds in (probed_s + 0.05, 0.05, 0.05):
        made.auto._counters.add("exchange_seconds", seconds)
        clock.now += 0.3
        note = exchange(made, clock, 1e6, dict.fromkeys(range(3), note)).note
        exposed.append(unpack_note(note[3:]).exposed_s)
    assert probed_s > 0.1 and exposed == pytest.approx([0.05] * 3, rel=0.01)


def test_late_workers_follow_the_lowest_rank_and_keep_one_setting_at_least() -> None:
    made, clock = worker("update[codec=auto,target=bytes]")
    exchange(made, clock, 1e6)
    auto = made.auto
    assert auto is not None
    assert auto.setting.name == "3lc[s=1,zstd]", "the first exchanges are critical"
    said = [level.name for level in auto.pilot.levels].index("3lc[s=1.9,zstd]")
    exchange(made, clock, 1e6, {0: bytes([said, 0, 0]), 2: bytes([1, 0, 0])})
    auto.pilot.memory.guard = 0
    assert auto.setting.name in ("3lc[s=1.9,zstd]", "3lc[s=1,zstd]")
    for junk in (b"", b"\x00", bytes([250, 0, 0]), bytes([1, 0xFF, 0xFF])):
        exchange(made, clock, 1e6, {0: junk})  # of a worker that is not ours: nothing breaks
    made, clock = worker()
    exchange(made, clock, 1e6)
    assert made.auto is not None
    for lacking_all in (255, 0b11111110, 1):
        exchange(made, clock, 1e6, {0: bytes([0, 0, 0, lacking_all])})
        assert made.auto.pilot.levels
        assert made.auto.setting in made.auto.pilot.levels
    assert [level.name for level in made.auto.pilot.levels] == ["bf16"]


def lacking(monkeypatch: pytest.MonkeyPatch, lacks: str, rank: int) -> tuple[LocalWorker, Clock]:
    """A worker on a device without kernels for a codec."""

    def encodes_on(level: Level, devices: Collection[torch.device]) -> bool:
        return not devices or level.codec is None or level.codec.id != lacks

    with monkeypatch.context() as device:
        device.setattr(Level, "encodes_on", encodes_on)
        return worker(rank=rank)


@pytest.mark.parametrize("lowest", [0, 1])
def test_workers_on_different_devices_choose_among_settings_that_all_have(
    lowest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, gpu = worker(rank=lowest), lacking(monkeypatch, "bf16", 1 - lowest)
    rates = [1e9, 1e9, 1e9, *[1e6] * 12]
    used: list[tuple[str, str]] = []
    notes: dict[int, bytes] = {}
    every = [level.name for level in AutoCodec().settings()]
    for bps in rates:
        for made, clock in (host, gpu):
            assert made.auto is not None
            waited_s = 2 * 8 * 2e4 / bps  # of int8
            clock.now += 0.01 + waited_s
            spent = {"wait_seconds": waited_s, "payload_bytes_push": 2e4, "payload_bytes_pull": 2e4}
            for name, much in spent.items():
                made.auto._counters.add(name, much)
        sent = [exchange(made, clock, bps, notes).note for made, clock in (host, gpu)]
        notes = {lowest: sent[0], 1 - lowest: sent[1]}
        autos = [made.auto for made, _ in (host, gpu) if made.auto is not None]
        used.append((autos[0].setting.name, autos[1].setting.name))
        assert [every[note[0]] for note in sent] == [*used[-1]], "a number is one setting on every rank"
        assert [len(note) % 16 for note in sent] == [3, 4], "what it lacks is told by a byte more"
    assert used[0] == ("bf16", "int8"), "nothing is known of the others yet"
    assert all(each == other for each, other in used[1:]), used
    assert "bf16" not in {each for each, _ in used[1:]} and "3lc[s=1,zstd]" in {each for each, _ in used}, used
    for made, _ in (host, gpu):
        assert made.auto is not None
        again, _ = worker(rank=made.auto._rank)
        assert again.auto is not None
        again.auto.load_state(made.auto.state())
        assert str(again.auto) == str(made.auto) and again.auto.state() == made.auto.state()
        assert again.auto.pilot.setting == made.auto.pilot.setting, "on another device too"


def test_a_restored_state_goes_on_bit_for_bit() -> None:
    made, clock = worker()
    note = exchange(made, clock, 1e6).note
    clock.now += 0.25
    made.conversations[0].notes = dict.fromkeys(range(3), note)
    assert made.auto is not None
    text = made.auto.state()
    again, later = worker()
    assert again.auto is not None
    later.now = 50.0
    again.auto.load_state(text)
    assert str(again.auto) == str(made.auto)
    both = [exchange(made, clock, 1e6, dict.fromkeys(range(3), note)), exchange(again, later, 1e6)]
    assert both[0] == both[1]
    damaged = text.replace(note.hex(), "x" + note.hex())
    for other in ("{}", damaged):
        with pytest.raises(ConfigError, match="state of codec=auto cannot be read"):
            again.auto.load_state(other)
    assert damaged != text
