"""The controller on a computed training: what it chooses on each link, how often it changes, and what it refuses."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

import pytest

from thinwire.errors import ConfigError
from thinwire.policies.auto.controller import GAIN, NOTE_NBYTES, SETTLING, STAY, Controller, Memory, Note, Workload
from thinwire.policies.auto.levels import Level, Limits

TRANSFORMER = Workload(coded=1_000_000, plain=25_000, ranks=4, groups=1, uncompressed_nbytes=4_100_000)
LENET = Workload(coded=60_000, plain=1_000, ranks=4, groups=1, uncompressed_nbytes=244_000)
SGD, ADAPTIVE = 1.0, 2.0


@dataclass
class Training:
    """A training whose steps take what the model of cost says, but for noise, on one rank's clock."""

    work: Workload = TRANSFORMER
    compute_s: float = 0.1
    overlap_s: float = 0.05
    optimizer: float = SGD
    noise: float = 0.03
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self.controller = Controller(self.limits.levels(), self.work, self.limits)
        self.random, self.probes, self.samples = random.Random(0), 0, list[Note]()
        self.under_way: tuple[Note, int] | None = None
        self.since_note = self.level = self.settling = 0

    def exchange_s(self, level: Level, bps: float) -> float:
        link_s = 8 * self.work.nbytes(level, level.bits) / bps
        return self.work.codec_s(level) + max(0.0, link_s - self.work.hidden_s(level, self.overlap_s))

    def run(self, rates: Iterable[float]) -> list[str]:
        """Returns the setting of each step."""
        found = []
        for bps in rates:
            controller = self.controller
            if self.under_way is not None:
                note, level = self.under_way
                controller.take([Note.unpack(note.pack())] * self.work.ranks, level)
            self.under_way, self.since_note = None, self.since_note + 1
            if self.since_note >= controller.note_every:
                medians = [median(column) for column in zip(*self.samples, strict=True)]
                self.under_way = Note(*medians)._replace(optimizer=self.optimizer), self.level
                self.samples, self.since_note = [], 0
            if controller.wants_probe:
                controller.take_link(bps)
                self.probes += 1
            controller.begin_step()
            if controller.memory.level != self.level:
                self.level, self.samples, self.settling = controller.memory.level, [], SETTLING
            setting = controller.setting
            exchange_s, coded = self.exchange_s(setting, bps), setting.codec is not None
            step_s = (self.compute_s + exchange_s) * self.random.uniform(1, 1 + self.noise)
            self.settling -= 1
            if self.settling < 0:
                codec_s = self.work.codec_s(setting)
                sent = self.work.nbytes(setting, setting.bits) if coded else 0.0
                self.samples.append(Note(step_s, 0.0 if coded else exchange_s, self.overlap_s, codec_s, sent))
            found.append(setting.name)
        return found

    def cost_s(self, name: str, bps: float) -> float:
        level = next(each for each in self.controller.levels if each.name == name)
        return level.steps * (self.compute_s + self.exchange_s(level, bps))


@pytest.mark.parametrize("bps", [1e6, 1e7, 5e7, 1e8, 1e9, 2e10])
@pytest.mark.parametrize("optimizer", [SGD, ADAPTIVE])
@pytest.mark.parametrize(("work", "compute_s"), [(TRANSFORMER, 0.1), (LENET, 0.006)])
def test_setting_costs_at_most_a_tenth_above_the_best_on_every_link(
    bps: float, optimizer: float, work: Workload, compute_s: float
) -> None:
    training = Training(work=work, compute_s=compute_s, overlap_s=compute_s / 2, optimizer=optimizer)
    names = training.run([bps] * 100)
    levels = [each for each in training.controller.levels if each.mild or optimizer == SGD]
    assert training.cost_s(names[-1], bps) <= 1.1 * min(training.cost_s(each.name, bps) for each in levels)
    assert training.controller.memory.changes <= 4 and training.probes == 1


def test_adaptive_and_unknown_optimizers_stay_within_eight_bits() -> None:
    for optimizer in (0.0, ADAPTIVE):
        training = Training(optimizer=optimizer)
        assert set(training.run([1e6] * 50)) == {"int8"}
        assert training.controller.held_back == (optimizer == ADAPTIVE)
    assert not (fast := Training(optimizer=ADAPTIVE)).run([1e10] * 20).count("int8") and not fast.controller.held_back


def test_one_adaptive_rank_holds_all_back_and_a_change_counts_at_once() -> None:
    training = Training()
    assert training.run([1e7] * 30)[-1].startswith("3lc")
    notes = [Note(optimizer=SGD)] * 3 + [Note(optimizer=ADAPTIVE)]
    training.controller.take(notes, training.controller.memory.level)
    assert training.controller.setting.name == "int8" and training.controller.memory.optimizer == "adaptive"


def test_slower_link_is_answered_within_ten_steps_and_a_faster_one_later() -> None:
    training = Training(optimizer=ADAPTIVE)
    assert training.run([3e9] * 60)[-1] == "uncompressed"
    names = training.run([5e6] * 12)
    assert names[10] == "int8", names
    assert training.run([5e9] * 300)[-1] == "uncompressed"


def test_setting_stays_for_eight_steps_and_one_that_is_as_good_does_not_replace_it() -> None:
    training = Training(noise=0.6, work=LENET, compute_s=0.006)
    names = training.run([2e7] * 400)
    changes = [at for at in range(1, 400) if names[at] != names[at - 1]]
    assert all(later - at >= STAY for at, later in itertools.pairwise(changes[1:])), changes
    assert GAIN == 1.05 and len(changes) < 12


def test_slower_computation_is_measured_once_and_changes_nothing() -> None:
    training = Training()
    training.run([5e7] * 60)
    before, training.compute_s = training.controller.setting, 0.4
    training.run([5e7] * 60)
    assert training.controller.setting == before and training.probes == 2


def test_target_bytes_takes_the_strongest_setting_that_the_optimizer_allows() -> None:
    for optimizer, expected in ((SGD, "3lc[s=1.9,entropy=zstd]"), (ADAPTIVE, "int8")):
        training = Training(limits=Limits(target="bytes"), optimizer=optimizer)
        assert training.run([1e9] * 30)[-1] == expected


def test_notes_of_a_clock_that_jumps_and_links_of_nothing_are_left_out() -> None:
    controller = Training().controller
    controller.take_link(1e8)
    before = controller.memory.state()
    for bad in (-1.0, math.nan, math.inf, 1e6):
        controller.take([Note(step_s=bad)] * 4, controller.memory.level)
    assert controller.memory.state() == before and NOTE_NBYTES == 24


def test_memory_travels_as_text_and_a_damaged_one_is_refused() -> None:
    training = Training()
    training.run([1e7] * 40)
    text = training.controller.memory.state()
    assert Memory.from_state(text) == training.controller.memory
    fewer = Limits(lag_limit=1).levels()
    other = Controller(fewer, TRANSFORMER, Limits())
    other.load(Memory.from_state(text))
    assert other.setting == fewer[-1]
    wrong = ((f'"{name}":', f'"{name}":-') for name in ("level", "stay", "link_bps", "compute_s", "since"))
    damaged: Sequence[str] = ("", "{}", text[:-1], text.replace("sgd", "SGD"), *(text.replace(*each) for each in wrong))
    for each in damaged:
        assert each != text
        with pytest.raises(ConfigError, match="codec='auto' cannot be read"):
            Memory.from_state(each)
