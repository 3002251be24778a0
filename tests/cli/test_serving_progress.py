"""What a server says to a person, of a shard and a clock that the test moves."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.cli.serving_progress import PROGRESS_S, ServingProgress


@dataclass
class Shard:
    here: tuple[int, ...] = ()
    interrupted_ranks: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    step: int = 0
    missing: tuple[int, ...] = ()
    steps_each: int = 1
    begun: bool = True
    numbers: dict[int, int] = field(default_factory=dict)

    @property
    def sessions(self) -> dict[int, int]:
        return {rank: self.numbers.get(rank, rank) for rank in self.here}


def test_joins_progress_departures_and_a_summary() -> None:
    core, told, time = Shard(), list[str](), [100.0]
    progress = ServingProgress(core, told.append, lambda: time[0])
    progress.look(0, 0)
    assert not told and progress.summary(0, 0) == "no worker has joined"

    core.here = (0, 1)
    progress.look(0, 0)
    assert told == ["worker 0 joined; 2 here", "worker 1 joined; 2 here"]

    time[0], core.step = 100 + PROGRESS_S / 2, 60
    progress.look(500_000, 10)
    time[0], core.step = 100 + PROGRESS_S, 120
    progress.look(1_500_000, 250)
    progress.look(1_500_000, 250)
    assert told[2:] == [f"step 120  {120 / PROGRESS_S:.1f} steps/s  received 1.5 MB, sent 250 B"]

    core.here = (0,)
    progress.look(0, 0)
    core.here = (0, 1)
    progress.look(0, 0)
    core.here, core.left = (), (0, 1)
    progress.look(0, 0)
    assert told[3:] == [
        "worker 1 is gone at step 120; 1 here",
        "worker 1 joined again at step 120; 2 here",
        "worker 0 has reached the end at step 120; 0 here",
        "worker 1 has reached the end at step 120; 0 here",
    ]
    assert progress.summary(1_500_000, 250) == "120 steps with 2 workers in 10.0 s, received 1.5 MB, sent 250 B"


def test_who_has_never_come_is_told_of_every_ten_seconds() -> None:
    core, told, time = Shard(missing=(0, 1, 2)), list[str](), [100.0]
    progress = ServingProgress(core, told.append, lambda: time[0])
    for seconds, here in ((30, ()), (31, (1,)), (40, (1,)), (41, (1,)), (45, (1,)), (51, (1, 2)), (61, (1,)), (90, ())):
        time[0], core.here = 100 + seconds, here
        progress.look(0, 0)
    assert [line for line in told if "waiting" in line] == [
        "waiting for workers 0, 2, which have not come yet",
        "waiting for worker 0, which has not come yet",
        "waiting for worker 0, which has not come yet",
    ]


def test_a_connection_that_is_broken_for_more_than_a_moment_is_told_of() -> None:
    core, told, time = Shard(here=(0, 1), step=30), list[str](), [100.0]
    progress = ServingProgress(core, told.append, lambda: time[0], grace_s=60.0)
    for seconds, here, broken in (
        (0.0, (0, 1), ()),
        (0.2, (0, 1), (1,)),
        (0.4, (0, 1), ()),  # back at once
        (0.6, (0, 1), (1,)),
        (1.8, (0, 1), (1,)),
        (2.0, (0, 1), (1,)),
        (2.2, (0, 1), ()),
        (2.4, (0, 1), (1,)),
        (3.8, (0, 1), (1,)),
        (62.4, (0,), ()),
    ):
        time[0], core.here, core.interrupted_ranks = 100 + seconds, here, broken
        progress.look(0, 0)
    lost = "worker 1 lost its connection at step 30; waited for, 60 s at most"
    assert told[2:] == [
        lost,
        "worker 1 is connected again at step 30",
        lost,
        "worker 1 is gone at step 30; 1 here",
    ]


def test_a_process_that_takes_the_place_of_a_broken_one_has_joined_again() -> None:
    core, told, time = Shard(here=(0, 1), step=30), list[str](), [100.0]
    progress = ServingProgress(core, told.append, lambda: time[0], grace_s=60.0)
    for seconds, broken, session in ((0.0, (), 1), (0.2, (1,), 1), (1.8, (1,), 1), (2.0, (), 7)):
        time[0], core.interrupted_ranks, core.numbers, core.step = 100 + seconds, broken, {1: session}, core.step + 1
        progress.look(0, 0)
    assert told[2:] == [
        "worker 1 lost its connection at step 33; waited for, 60 s at most",
        "worker 1 joined again at step 34; 2 here",
    ]


def test_one_that_went_before_all_had_come_is_waited_for() -> None:
    core, told, time = Shard(here=(0,), missing=(0, 1), begun=False), list[str](), [100.0]
    progress = ServingProgress(core, told.append, lambda: time[0])
    for seconds, here in ((0, (0, 1)), (1, (0,)), (12, (0,))):
        time[0], core.here = 100 + seconds, here
        progress.look(0, 0)
    assert told[-1] == "waiting for worker 1, which has not come yet"
