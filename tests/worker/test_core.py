"""A cluster of cores comes to the bits of plain torch, whatever the schedule."""

from __future__ import annotations

import pytest
import torch

from tests.worker.cluster import SHARDS, WORKERS, Cluster, Player, Program, gradient, make_player
from thinwire.errors import ProtocolError
from thinwire.policies.designs import Design, design
from thinwire.server.core import ServerCore
from thinwire.worker.effects import Procedure

STEPS = 6


def train(player: Player) -> Procedure[None]:
    """What hooks and a training loop would call."""
    worker = player.worker
    yield from worker.start()
    while max(worker.iteration, worker.clock) < STEPS:  # a worker may be carried past exchanges
        step = worker.iteration
        for tensor in worker.model.tensors:
            yield from worker.pull(tensor)
        player.model["statistic"].add_(1 + worker.rank)
        for tensor in worker.model.tensors:
            if not tensor.state:
                tensor.parameter.grad = gradient(worker.rank, step, tensor.name)
                yield from worker.gradient_ready(tensor)
        yield from worker.end_step()
        yield from worker.settle()
    yield from worker.flush()


def play(
    name: str | Design, *, seed: int = 0, chunk_nbytes: int = 100, program: Program = train
) -> tuple[list[Player], list[ServerCore]]:
    """Runs every worker's program on shards that wait for all."""
    cluster = Cluster(design(name), program, seed, chunk_nbytes=chunk_nbytes)
    cluster.run()
    return cluster.players, cluster.cores


def expected(every: int = 1) -> dict[str, torch.Tensor]:
    """The same training in plain torch: the mean of what accumulated over `every` steps."""
    model = make_player(0, design("fp32")).model
    names = ("weight", "bias")
    optimizer = torch.optim.SGD([model[name] for name in names], lr=0.1, momentum=0.5)
    for step in range(every - 1, STEPS, every):
        for name in names:
            model[name].grad = sum(
                gradient(rank, earlier, name)
                for earlier in range(step - every + 1, step + 1)
                for rank in range(WORKERS)
            ).div(WORKERS)  # type: ignore[union-attr]
        optimizer.step()
    return {name: model[name] for name in names}


def test_uncompressed_training_is_plain_torch() -> None:
    for name, every in (("fp32", 1), ("local2", 2), ("local2[steps=3]", 3)):
        players, cores = play(name)
        for player in players:
            for key, value in expected(every).items():
                torch.testing.assert_close(player.model[key], value, rtol=1e-4, atol=1e-5, msg=f"{name}: {key}")
        assert [core.step for core in cores] == [STEPS // every] * SHARDS


def test_bits_do_not_depend_on_the_schedule_or_on_the_chunks() -> None:
    for name in ("3lc", "stoch3", "terngrad", "doublesqueeze-1bit", "entropy", "mem-sgd-topk"):
        players, cores = play(name)
        for seed, chunk_nbytes in ((1, 1), (2, 1 << 20)):
            others, _ = play(name, seed=seed, chunk_nbytes=chunk_nbytes)
            for player, other in zip(players, others, strict=True):
                for key in ("weight", "bias"):
                    assert torch.equal(player.model[key], other.model[key]), (name, key)
        assert torch.equal(players[0].model["weight"], players[1].model["weight"])
        if name == "3lc":
            assert abs(cores[0].tables[0].residual).max() > 0, "what was not sent waits at the shard"


def test_worker_0s_buffers_reach_the_others() -> None:
    """They travel with exchanges 0, 2, 4; afterwards each worker counts on by itself."""
    players, _ = play("fp32")
    start = make_player(0, design("fp32")).model["statistic"]
    for rank, player in enumerate(players):
        assert torch.allclose(player.model["statistic"], start + 5 + (1 + rank), atol=1e-5), rank


def test_every_policy_comes_to_its_end() -> None:
    for policy in ("ssp[2]", "ssp[1,mode=aggressive]", "ssp[2,mode=traditional]", "backup[1]", "asp", "adaptive[norm]"):
        for seed in range(3):
            players, cores = play(design("3lc", consistency=policy), seed=seed)
            clocks = [player.worker.clock for player in players]
            assert min(clocks) >= STEPS // 3 and all(core.failed is None for core in cores), (policy, clocks)


def test_a_layer_that_is_not_called_in_every_step_is_waited_for_at_its_end() -> None:
    """What is pushed of it, no gradient, would come before its turn where another worker is slow."""

    def sometimes(player: Player) -> Procedure[None]:
        worker = player.worker
        yield from worker.start()
        [weight, bias, statistic] = worker.model.tensors
        while worker.clock < STEPS:
            called = (weight, bias) if worker.clock % 3 == 0 else (weight,)
            bias.parameter.grad = None
            for tensor in (*called, statistic):
                yield from worker.pull(tensor)
            for tensor in called:
                tensor.parameter.grad = gradient(worker.rank, worker.clock, tensor.name)
                yield from worker.gradient_ready(tensor)
            yield from worker.end_step()
        yield from worker.flush()

    for seed in range(5):
        for policy in ("bsp", "local[2]", "ssp[1,mode=aggressive]"):
            chosen = design("fp32", consistency=policy, digest_every=1 if policy == "bsp" else 0)
            players, cores = play(chosen, seed=seed, program=sometimes)
            assert all(core.failed is None for core in cores), (policy, seed)
            assert all(torch.equal(each.model["bias"], players[0].model["bias"]) for each in players)


def test_a_tensor_is_used_when_it_is_up_to_date_and_nothing_is_done_after_leaving() -> None:
    def hasty(player: Player) -> Procedure[None]:
        worker = player.worker
        yield from worker.start()
        [weight, bias, _] = worker.model.tensors
        for tensor in (weight, bias):
            tensor.parameter.grad = gradient(worker.rank, 0, tensor.name)
            yield from worker.gradient_ready(tensor)
        yield from worker.end_step()
        with pytest.raises(ProtocolError, match="'weight' was used before its last update was applied"):
            yield from worker.gradient_ready(weight)
        yield from worker.sync()
        worker.closed = True
        for procedure in (worker.end_step, worker.sync):
            with pytest.raises(ProtocolError, match="has left the training"):
                yield from procedure()

    play("fp32", program=hasty)
