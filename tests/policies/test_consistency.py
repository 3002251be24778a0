"""What each consistency policy promises, held to it under random schedules of a whole cluster.

Gradients are one-hot: every worker has a coordinate of its own for every iteration, the rate is 1 and gradients are
summed. So a weight of −1 says that this very gradient was applied once, 0 that it was not, −2 that it was doubled; and
a worker's copy shows exactly which gradients its model has seen.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

import thinwire as tw
from tests.designs.network import Actor, Network
from thinwire.errors import ConfigError
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.policies.consistency import SHIPPED, Asp, Backup, Bsp, Consistency, Local, Ssp, consistency, name_of
from thinwire.schema import Delta, Push

torch.set_num_threads(1)

ITERATIONS = 5
TABLES = 2


class Ledger(nn.Module):
    """Tables of one coordinate for each worker and iteration, in modules of their own."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        shape = (workers, ITERATIONS)
        self.pages = nn.ModuleList([_Page(shape) for _ in range(TABLES)])

    def forward(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        losses = [page(gradient) for page, gradient in zip(self.pages, gradients, strict=True)]
        return torch.stack(losses).sum()

    def copies(self) -> list[NDArray[Any]]:
        return [parameter.detach().numpy().copy() for parameter in self.parameters()]


class _Page(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


@dataclass
class Diary:
    """What one worker saw."""

    seen: list[list[NDArray[Any]]] = field(default_factory=list)
    """Its copies before each iteration's gradient was taken."""
    clocks: list[int] = field(default_factory=list)
    """Its clock at each iteration."""
    end: list[NDArray[Any]] = field(default_factory=list)
    residuals: list[NDArray[Any]] = field(default_factory=list)
    held: list[NDArray[Any]] = field(default_factory=list)
    late: int = 0
    clock: int = 0


@dataclass
class Case:
    """A cluster and its schedule."""

    workers: int
    servers: int
    speeds: tuple[int, ...]
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    workers = draw(st.integers(2, 4))
    speeds = draw(st.tuples(*[st.sampled_from([0, 1, 1, 8]) for _ in range(workers)]))
    return Case(workers, draw(st.integers(1, 3)), speeds, draw(st.integers(0, 2**32)))


schedules = settings(max_examples=10, deadline=None)


def one_hot(workers: int, rank: int, iteration: int) -> torch.Tensor:
    gradient = torch.zeros(workers, ITERATIONS)
    gradient[rank, iteration] = 1.0
    return gradient


def play(case: Case, policy: str | Consistency, *, flush: bool = True, **options: Any) -> tuple[list[Diary], Network]:
    """Trains by the schedule; returns the workers' diaries, and the network with all that was said."""

    def work(actor: Actor) -> Diary:
        model = Ledger(case.workers)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        chosen: dict[str, Any] = {"codec": "fp32", "reduce": "sum", "min_numel": 1, **options}
        opt = tw.distribute(
            model,
            optimizer,
            server=actor.network.connect(actor),
            rank=actor.rank,
            workers=case.workers,
            consistency=policy,
            **chosen,
        )
        with opt:
            return write(Diary(), actor, model, opt, case.workers, flush=flush)

    network = Network(
        work, workers=case.workers, servers=case.servers, speeds=case.speeds, chance=random.Random(case.seed)
    )
    return network.run(), network


def write(
    diary: Diary, actor: Actor, model: Ledger, opt: DistributedOptimizer, workers: int, *, flush: bool = True
) -> Diary:
    while max(opt.steps_done, opt.clock) < ITERATIONS:
        iteration = opt.steps_done
        diary.clocks.append(opt.clock)
        opt.zero_grad()
        loss = model([one_hot(workers, actor.rank, iteration)] * TABLES)
        diary.seen.append(model.copies())
        actor.pause()
        loss.backward()
        opt.step()
    if flush:
        opt.flush()
    opt.sync()
    diary.end = model.copies()
    for slot in opt._exchange.pushing():
        state = slot.state_dict()
        residual, held = state.get("residual"), state.get("held")
        nothing = np.zeros((workers, ITERATIONS), np.float32)
        diary.residuals.append(residual.numpy().copy() if isinstance(residual, torch.Tensor) else nothing)
        diary.held.append(held.numpy().copy() if isinstance(held, torch.Tensor) else nothing)
    diary.clock = opt.clock
    diary.late = int(opt.traffic().get("late_pushes", 0))
    return diary


def server_values(network: Network) -> list[NDArray[Any]]:
    """The shards' own values, in the model's order."""
    found = {table.spec.name: table.values.numpy() for core in network.cores for table in core.tables}
    return [found[f"pages.{index}.weight"] for index in range(TABLES)]


def applied(up_to: int, workers: int) -> NDArray[Any]:
    """The copy that has seen every gradient of the iterations before `up_to`, once, and no other."""
    copy = np.zeros((workers, ITERATIONS), np.float32)
    copy[:, :up_to] = -1
    return copy


# ---- bounds on staleness


@given(case=cases())
@schedules
def test_bsp_each_model_has_seen_exactly_everything_before(case: Case) -> None:
    diaries, _ = play(case, "bsp")
    for diary in diaries:
        for iteration, copies in enumerate(diary.seen):
            for copy in copies:
                np.testing.assert_array_equal(copy, applied(iteration, case.workers))
        for copy in diary.end:
            np.testing.assert_array_equal(copy, applied(ITERATIONS, case.workers))


@pytest.mark.parametrize("mode", ["aggressive", "traditional"])
@pytest.mark.parametrize("staleness", [1, 3])
@given(case=cases())
@schedules
def test_ssp_a_model_lacks_at_most_so_many_clocks(mode: str, staleness: int, case: Case) -> None:
    diaries, network = play(case, f"ssp[staleness={staleness},mode={mode}]")
    for diary in diaries:
        for iteration, copies in enumerate(diary.seen):
            for copy in copies:
                clock = int(-copy[0].sum())
                np.testing.assert_array_equal(copy, applied(clock, case.workers), err_msg="whole clocks alone")
                assert iteration - staleness <= clock <= iteration
        for copy in diary.end:
            np.testing.assert_array_equal(copy, applied(ITERATIONS, case.workers))
    for values in server_values(network):
        np.testing.assert_array_equal(values, applied(ITERATIONS, case.workers))


@pytest.mark.parametrize("policy", ["ssp[staleness=1]", "ssp[staleness=2]", "local[2]", "local[3]"])
@given(case=cases())
@schedules
def test_passive_ssp_and_local_steps_exchange_what_accumulated(policy: str, case: Case) -> None:
    every = int(policy[-2]) + policy.startswith("ssp")
    diaries, network = play(case, policy)
    for diary in diaries:
        for iteration, copies in enumerate(diary.seen):
            for copy in copies:
                np.testing.assert_array_equal(copy, applied(iteration // every * every, case.workers))
        for copy in diary.end:
            np.testing.assert_array_equal(copy, applied(ITERATIONS, case.workers), err_msg="flush() sends the rest")
    exchanges = -(-ITERATIONS // every)
    pushes = {(rank, message.step) for _, rank, message in network.heard if isinstance(message, Push)}
    assert pushes == {(rank, step) for rank in range(case.workers) for step in range(exchanges)}


@given(case=cases())
@schedules
def test_without_a_flush_local_steps_hold_the_rest(case: Case) -> None:
    diaries, network = play(case, "local[3]", flush=False)
    for rank, diary in enumerate(diaries):
        for values, held in zip(server_values(network), diary.held, strict=True):
            np.testing.assert_array_equal(held[rank] - values[rank], np.ones(ITERATIONS))
            np.testing.assert_array_equal(values, applied(3, case.workers))


# ---- staleness 0 is bulk-synchronous


@pytest.mark.parametrize("codec", ["fp32", "3lc", "stoch3"])
@pytest.mark.parametrize("mode", ["passive", "aggressive", "traditional"])
@given(case=cases())
@settings(max_examples=5, deadline=None)
def test_staleness_zero_is_bsp_bit_for_bit(codec: str, mode: str, case: Case) -> None:
    other = Case(case.workers, case.servers, (1,) * case.workers, case.seed + 1)
    stale, _ = play(case, f"ssp[staleness=0,mode={mode}]", codec=codec)
    plain, _ = play(other, "bsp", codec=codec)
    for diary, expected in zip(stale, plain, strict=True):
        for copies, others in zip([*diary.seen, diary.end], [*expected.seen, expected.end], strict=True):
            for copy, another in zip(copies, others, strict=True):
                assert copy.tobytes() == another.tobytes()


# ---- a silent worker (checklist, C12)


def silence(policy: str, silent: int, case: Case) -> list[int]:
    """How many iterations each of the others begins once one worker has fallen silent after it joined."""
    begun = [0] * case.workers

    def work(actor: Actor) -> None:
        model = Ledger(case.workers)
        opt = tw.distribute(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            server=actor.network.connect(actor),
            rank=actor.rank,
            workers=case.workers,
            consistency=policy,
            codec="fp32",
            min_numel=1,
        )
        actor.pause()
        for iteration in range(ITERATIONS):
            loss = model([one_hot(case.workers, actor.rank, iteration)] * TABLES)
            begun[actor.rank] += 1
            actor.pause()
            loss.backward()
            opt.step()
            opt.zero_grad()

    network = Network(work, workers=case.workers, chance=random.Random(case.seed))
    try:
        while min(min(table.version for table in core.tables) if core.tables else -1 for core in network.cores) < 0:
            network.move()
        awake = [rank for rank in range(case.workers) if rank != silent]
        while begun[silent] == 0 and not network.actors[silent].can_move:
            network.move()
        before = begun[silent]
        while network.move(awake):
            pass
        assert begun[silent] == before and not any(network.actors[rank].done for rank in awake)
        return [begun[rank] for rank in awake]
    finally:
        network.give_up()


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("bsp", 1),
        ("ssp[staleness=1,mode=passive]", 2),
        ("ssp[staleness=1,mode=aggressive]", 2),
        ("ssp[staleness=1,mode=traditional]", 2),
        ("ssp[staleness=3,mode=aggressive]", 4),
        ("local[3]", 3),
    ],
)
def test_the_others_run_until_the_bound_and_block(policy: str, expected: int) -> None:
    """Staleness 1 and a silent peer: iterations 0 and 1 run, 2 blocks."""
    assert silence(policy, 1, Case(3, 1, (1, 1, 1), 7)) == [expected, expected]


def test_passive_ssp_says_nothing_before_the_bound() -> None:
    """Staleness 1: the exchange starts after iteration 1."""
    policy = consistency("ssp[staleness=1]")
    assert [policy.exchanges(iteration) for iteration in range(6)] == [False, True] * 3


# ---- asynchronous


@given(case=cases())
@schedules
def test_asp_applies_every_gradient_exactly_once(case: Case) -> None:
    diaries, network = play(case, "asp")
    for values in server_values(network):
        np.testing.assert_array_equal(values, applied(ITERATIONS, case.workers))
    for rank, diary in enumerate(diaries):
        for iteration, copies in enumerate([*diary.seen, diary.end]):
            for copy in copies:
                assert set(np.unique(copy)) <= {0.0, -1.0}
                np.testing.assert_array_equal(copy[rank, :iteration], -1, err_msg="its own are all in")
                np.testing.assert_array_equal(copy[rank, iteration:], 0)


@given(case=cases())
@schedules
def test_asp_each_copy_is_the_servers_values_minus_its_own_residual(case: Case) -> None:
    """Top-k pulls: what a copy has not been sent waits for it alone (the thesis' per-client sums)."""
    diaries, network = play(case, "asp", codec="fp32", codec_down=tw.codec("topk", k=2))
    for rank, diary in enumerate(diaries):
        for index, end in enumerate(diary.end):
            [table] = [
                table for core in network.cores for table in core.tables if table.spec.name == f"pages.{index}.weight"
            ]
            copy = table.downlink.snapshot(rank)
            np.testing.assert_array_equal(end, copy, err_msg="the server knows each copy bit for bit")
            unsent = table.values.numpy() - copy
            assert set(np.unique(unsent)) <= {0.0, -1.0}
            np.testing.assert_array_equal(table.values.numpy(), applied(ITERATIONS, case.workers))


def test_a_rate_is_that_of_the_updates_own_clock() -> None:
    """Under staleness a worker's push may be ahead; the update before it still goes by its own rate."""

    def work(actor: Actor) -> list[NDArray[Any]]:
        model = Ledger(2)
        opt = tw.distribute(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            server=actor.network.connect(actor),
            rank=actor.rank,
            workers=2,
            consistency="ssp[staleness=3,mode=aggressive]",
            codec="fp32",
            min_numel=1,
            reduce="sum",
        )
        with opt:
            for iteration in range(ITERATIONS):
                for group in opt.param_groups:
                    group["lr"] = 2.0**-iteration
                opt.zero_grad()
                model([one_hot(2, actor.rank, iteration)] * TABLES).backward()
                opt.step()
            opt.sync()
        return model.copies()

    expected = -np.broadcast_to(2.0 ** -np.arange(ITERATIONS), (2, ITERATIONS))
    for seed in range(8):
        network = Network(work, workers=2, chance=random.Random(seed), speeds=(8, 1))
        for copies in network.run():
            for copy in copies:
                np.testing.assert_array_equal(copy, expected)


# ---- backup workers


def rounds(network: Network) -> dict[tuple[str, int], tuple[int, ...]]:
    """Whose gradients each update of each table is made of, as the shards announced it."""
    found = {}
    for shard, message, _ in network.said:
        if isinstance(message, Delta):
            for table in message.tables:
                core = network.cores[shard]
                ranks = message.ranks or tuple(range(len(network.actors)))
                found[core.tables[table].spec.name, message.version] = ranks
    return found


@pytest.mark.parametrize("spare", [0, 1, 2])
@given(case=cases())
@schedules
def test_backup_updates_are_made_of_exactly_the_gradients_they_name(spare: int, case: Case) -> None:
    diaries, network = play(case, f"backup[{spare}]")
    quorum = max(1, case.workers - spare)
    made = rounds(network)
    late = 0
    for index, values in enumerate(server_values(network)):
        name = f"pages.{index}.weight"
        expected = np.zeros((case.workers, ITERATIONS), np.float32)
        for rank, diary in enumerate(diaries):
            for iteration, clock in enumerate(diary.clocks):
                expected[rank, iteration] = -(rank in made[name, clock + 1])
                late += rank not in made[name, clock + 1]
        np.testing.assert_array_equal(values, expected)
        assert all(len(ranks) == quorum for (table, _), ranks in made.items() if table == name)
    assert sum(diary.late for diary in diaries) == late, "every late push was announced as such"
    for diary in diaries:
        assert diary.clock >= ITERATIONS, "everybody came to the end"
        for copy, values in zip(diary.end, server_values(network), strict=True):
            np.testing.assert_array_equal(copy, values)


@given(case=cases())
@schedules
def test_backup_a_late_push_leaves_no_trace_in_the_residual(case: Case) -> None:
    """The residual is bit for bit what it would be had the late gradients never been."""
    codec = tw.codec("3lc", sparsity=1.5)
    diaries, network = play(case, "backup[1]", codec=codec)
    made = rounds(network)
    for rank, diary in enumerate(diaries):
        for index, residual in enumerate(diary.residuals):
            alone = codec.context(torch.zeros(case.workers, ITERATIONS))
            for iteration, clock in enumerate(diary.clocks):
                if rank in made[f"pages.{index}.weight", clock + 1]:
                    alone.encode(one_hot(case.workers, rank, iteration))
            assert alone.residual is not None
            assert residual.tobytes() == alone.residual.numpy().tobytes()


def test_a_slow_worker_goes_on_with_the_newest_version() -> None:
    """Its clock jumps; and updates that came before it pushed are noticed, too."""
    jumps = late = 0
    for seed in range(12):
        diaries, _ = play(Case(3, 2, (20, 20, 1), seed), "backup[1]")
        clocks = diaries[2].clocks
        assert clocks == sorted(set(clocks))
        jumps += any(after > before + 1 for before, after in itertools.pairwise(clocks))
        late += diaries[2].late
    assert jumps >= 3 and late >= 12


@pytest.mark.parametrize("policy", ["bsp", "asp", "backup[1]", "backup[2]"])
@given(case=cases())
@example(case=Case(2, 2, (8, 8), 22))  # a worker joins between two shards' updates of one step
@schedules
def test_when_worker_zero_ends_the_training_everybody_ends(policy: str, case: Case) -> None:
    def work(actor: Actor) -> tuple[int, list[NDArray[Any]]]:
        model = Ledger(case.workers)
        opt = tw.distribute(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            server=actor.network.connect(actor),
            rank=actor.rank,
            workers=case.workers,
            consistency=policy,
            codec="fp32",
            min_numel=1,
        )
        with opt:
            while not opt.finished:
                assert opt.steps_done < 2000
                if actor.rank == 0 and opt.steps_done >= 2:
                    opt.stop_after_this_step()
                opt.zero_grad()
                model([one_hot(case.workers, actor.rank, opt.steps_done % ITERATIONS)] * TABLES).backward()
                actor.pause()
                opt.step()
            opt.sync()
            return opt.clock, model.copies()

    network = Network(
        work,
        workers=case.workers,
        servers=case.servers,
        speeds=[max(1, speed) for speed in case.speeds],  # where nobody waits for worker 0, it may not be silent
        chance=random.Random(case.seed),
    )
    results = network.run()
    if consistency(policy).replicas_end_equal:
        assert len({clock for clock, _ in results}) == 1
        for _, copies in results:
            for copy, first in zip(copies, results[0][1], strict=True):
                np.testing.assert_array_equal(copy, first)


# ---- adaptive


@pytest.mark.parametrize("when", ["norm", "variance", "period"])
@given(case=cases())
@schedules
def test_adaptive_what_is_not_sent_is_held(when: str, case: Case) -> None:
    threshold = {"norm": 0.9, "variance": 2.0, "period": 3}[when]
    diaries, network = play(case, f"adaptive[{when},threshold={threshold}]", flush=False)
    for index, values in enumerate(server_values(network)):
        held = sum(diary.held[index] for diary in diaries)
        np.testing.assert_array_equal(values - held, applied(ITERATIONS, case.workers))
    for diary in diaries:
        for copy, values in zip(diary.end, server_values(network), strict=True):
            np.testing.assert_array_equal(copy, values)


def test_adaptive_holds_some_and_a_flush_sends_them() -> None:
    case = Case(3, 1, (1, 1, 1), 3)
    kept, _ = play(case, "adaptive[period,threshold=3]", flush=False)
    assert any(held.any() for diary in kept for held in diary.held)
    sent, network = play(case, "adaptive[period,threshold=3]")
    assert not any(held.any() for diary in sent for held in diary.held)
    for values in server_values(network):
        np.testing.assert_array_equal(values, applied(ITERATIONS, case.workers))


# ---- names


@pytest.mark.parametrize(
    "name",
    [
        "bsp",
        "asp",
        "ssp[5]",
        "ssp[staleness=5]",
        "ssp[τ=5,mode=aggressive]",
        "backup[1]",
        "backup[b=2]",
        "local[k=4]",
        "adaptive[norm,threshold=0.05]",
        "adaptive[time]",
    ],
)
def test_the_full_name_makes_an_equal_policy(name: str) -> None:
    policy = consistency(name)
    assert consistency(name_of(policy)) == policy
    assert consistency(policy) is policy
    assert name_of(consistency(name_of(policy))) == name_of(policy)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("bsp", Bsp()),
        ("asp", Asp()),
        ("ssp[3]", Ssp(staleness=3)),
        ("ssp[τ=3,mode=traditional]", Ssp(staleness=3, mode="traditional")),
        ("backup", Backup(spare=1)),
        ("local[k=3]", Local(steps=3)),
    ],
)
def test_short_names(name: str, policy: Consistency) -> None:
    assert consistency(name) == policy


@pytest.mark.parametrize("kind", SHIPPED)
def test_every_policy_says_what_it_is_and_where_it_comes_from(kind: type[Consistency]) -> None:
    assert consistency(kind.id).about().endswith(")")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("psp", "unknown consistency 'psp'; there are bsp, asp, ssp, backup, local, adaptive"),
        ("ssp[-1]", r"ssp: staleness is -1; it must be a whole number of at least 0"),
        ("ssp[staleness=true]", "staleness is True"),
        ("ssp[1.5]", "staleness is 1.5"),
        ("ssp[2,mode=lazy]", "mode='lazy'; allowed are passive, aggressive and traditional"),
        ("backup[-1]", "spare is -1"),
        ("local[0]", "steps is 0; it must be a whole number of at least 1"),
        ("bsp[staleness=1]", r"consistency bsp: unknown options \['staleness'\]; there are \[\]"),
        ("bsp[1]", "'1' is not option=value"),
        ("adaptive[mood]", "unknown criterion 'mood'"),
        ("adaptive[norm,threshold=-1]", "threshold=-1"),
        ("adaptive[norm,threshold=nan]", "threshold='nan'"),
    ],
)
def test_what_is_no_policy(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        consistency(name)
