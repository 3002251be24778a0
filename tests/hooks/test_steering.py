"""A worker's momentum, led by what all workers did: against arithmetic, and what it brings workers of unlike data."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import adamw, batch, inner_step, mlp, resume, steps, values
from thinwire.codecs import codec
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.steering import Steering
from thinwire.policies.assignment import Partition
from thinwire.policies.designs import design as find_design
from thinwire.worker.model import PlannedTensor, WorkerTensor


def momenta(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
    """After some rounds on data of each worker's own."""
    for step in range(12):
        inner_step(model, opt, rank, step)
    opt.sync()
    return torch.cat([opt.state[parameter]["exp_avg"].reshape(-1) for parameter in model.parameters()]).clone()


def apart(design: str) -> float:
    [first, second], _ = run_cluster(mlp, momenta, workers=2, optimizer=adamw, design=design)
    return float((first - second).norm() / (first + second).norm())


def test_workers_momenta_come_nearer_to_each_other() -> None:
    unsteered, somewhat, much = (apart(f"local-sgd[h=4,steer={share}]") for share in (0, 0.3, 0.9))
    assert 0 < much < somewhat < unsteered


@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_step_in_the_direction_that_all_went_leaves_a_worker_alone_where_it_was(amsgrad: bool) -> None:
    """One worker, uncoded, H = 1: what all did is what it did, and so is its momentum."""

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=amsgrad)

    runs = [
        run_cluster(mlp, steps(8), workers=1, optimizer=adam, design=f"local-sgd[h=1,codec=fp32,steer={share}]")[0][0]
        for share in (0.0, 0.5)
    ]
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-3, atol=1e-4)


def test_of_several_optimizers_each_adam_is_led() -> None:
    def split(model: nn.Module) -> list[torch.optim.Optimizer]:
        [first, *others] = model.parameters()
        return [torch.optim.AdamW(some, lr=0.01) for some in ([first], others)]

    def whole(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    runs = [
        run_cluster(mlp, momenta, workers=2, optimizer=optimizer, design="local-sgd[h=2,codec=fp32,steer=0.6]")[0]
        for optimizer in (whole, split)
    ]
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


def test_the_rates_are_those_of_the_round_also_where_its_answer_is_waited_for_at_once() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        for step in range(8):
            opt.param_groups[0]["lr"] = 0.01 / (1 + step)
            inner_step(model, opt, rank, step)
        opt.sync()
        return torch.cat([opt.state[each]["exp_avg"].reshape(-1) for each in model.parameters()])

    design = "local-sgd[h=2,codec=fp32,steer=0.6]"
    later, at_once = (
        run_cluster(mlp, train, workers=2, optimizer=adamw, design=design, overlap=overlap)[0]
        for overlap in (True, False)
    )
    assert all(torch.equal(one, other) for one, other in zip(later, at_once, strict=True))


def test_the_outer_rate_is_the_one_of_the_push() -> None:
    """It may be written while the answer is on its way, and counts from the next push."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        for step in range(8):
            inner_step(model, opt, rank, step)
            if step % 2:  # what was changed has just been pushed
                opt.outer_groups[0]["lr"] = 1 / (1 + step)
        opt.sync()
        return torch.cat([opt.state[each]["exp_avg"].reshape(-1) for each in model.parameters()])

    design = "local-sgd[h=2,codec=fp32,steer=0.6]"
    later, at_once = (
        run_cluster(mlp, train, workers=2, optimizer=adamw, design=design, overlap=overlap)[0]
        for overlap in (True, False)
    )
    assert all(torch.equal(one, other) for one, other in zip(later, at_once, strict=True))


def shrunk(design: str, optimizer: Any, every: int = 1) -> float:
    """By which factor weights of 1 have shrunk after 120 steps, with noise for a gradient in every so-manieth."""

    def ones(_rank: int) -> nn.Module:
        model = nn.Linear(64, 64, bias=False)
        nn.init.ones_(model.weight)
        return model

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> float:
        noise = torch.Generator().manual_seed(1)
        for step in range(120):
            opt.zero_grad()
            model(torch.zeros(1, 64)).sum().backward()
            [weight] = model.parameters()
            weight.grad = torch.randn(64, 64, generator=noise) if step % every == 0 else None
            opt.step()
        opt.flush()
        return float(values(model).mean())

    [found], _ = run_cluster(ones, train, workers=1, optimizer=optimizer, design=design)
    return -math.log(found)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, partial(torch.optim.Adam, decoupled_weight_decay=True)])
@pytest.mark.parametrize("codec_option", ["codec=fp32", "codec=3lc"])
def test_steered_weights_decay_as_fast_as_unsteered_ones(codec_option: str, kind: Any) -> None:
    """What decay has taken leads no momentum, which would take it again and again."""

    def decaying(model: nn.Module) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = kind(model.parameters(), lr=0.01, weight_decay=0.1)
        return made

    unsteered, steered = (shrunk(f"local-sgd[h=4,{codec_option},steer={share}]", decaying) for share in (0.0, 0.6))
    assert 0.9 < unsteered / 0.12 < 1.1 and 0.85 < steered / unsteered < 1.2


@pytest.mark.parametrize(("design", "every"), [("local-sgd[h=4,codec=fp32", 4), ("sparseloco[h=4", 1)])
def test_decay_that_was_not_taken_or_not_sent_leads_nobody(design: str, every: int) -> None:
    """AdamW leaves a parameter without a gradient alone; a value that nobody sent has not changed at the shards."""
    unsteered, steered = (shrunk(f"{design},steer={share}]", adamw, every) for share in (0.0, 0.6))
    assert 0.7 < steered / unsteered < 1.2


@pytest.mark.parametrize("design", ["local-sgd[h=4,steer={}]", "sparseloco[h=8,steer={}]"])
def test_what_waited_since_rates_were_high_leads_to_no_huge_momentum(design: str) -> None:
    """A rate that falls to a thousandth for two rounds, and rises again."""

    def longest(rank: int, model: nn.Module, opt: DistributedOptimizer) -> float:
        found = 0.0
        for step in range(64):
            opt.param_groups[0]["lr"] = 1e-5 if step % 32 >= 16 else 1e-2
            inner_step(model, opt, rank, step)
            for state in opt.state.values() if step >= 20 else ():
                first, second = state["exp_avg"], state["exp_avg_sq"]
                found = max(found, float((first / (second.sqrt() + 1e-8)).abs().max()))
        return found

    unsteered, steered = (
        max(run_cluster(mlp, longest, workers=2, optimizer=adamw, design=design.format(share))[0]) for share in (0, 0.6)
    )
    assert steered < 3 * unsteered


def test_optimizers_whose_moments_are_not_known_go_unsteered() -> None:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    found = [
        run_cluster(mlp, steps(9), workers=2, optimizer=sgd, design=f"local-sgd[h=4{steer}]")[0][0]
        for steer in ("", ",steer=0")
    ]
    assert torch.equal(*found)


def test_a_rate_of_zero_steers_nothing() -> None:
    def resting(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.0)

    [found, _], _ = run_cluster(mlp, steps(9), workers=2, optimizer=resting, design="local-sgd[h=4]")
    parameters = nn.utils.parameters_to_vector(mlp(0).parameters())
    assert torch.equal(found[: parameters.numel()], parameters.detach())


@pytest.mark.parametrize("stop", [6, 8])
def test_rates_of_steps_that_wait_are_kept(stop: int) -> None:
    """In the middle of a round, and at the end of one, with a rate that falls."""
    design, total = "local-sgd[h=4]", 15

    def train(those: range, model: nn.Module, opt: DistributedOptimizer, rank: int) -> None:
        for step in those:
            opt.param_groups[0]["lr"] = 0.02 / (1 + step)
            inner_step(model, opt, rank, step)

    def whole(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        train(range(total), model, opt, rank)
        opt.flush()
        return values(model)

    def first(rank: int, model: nn.Module, opt: DistributedOptimizer) -> dict[str, Any]:
        train(range(stop), model, opt, rank)
        opt.sync()
        return copy.deepcopy({"model": model.state_dict(), "opt": opt.state_dict()})

    expected, _ = run_cluster(mlp, whole, workers=2, optimizer=adamw, design=design)
    saved, core = run_cluster(mlp, first, workers=2, optimizer=adamw, design=design)
    assert saved[0]["opt"]["steering"]["rates"] == ([0.02 / 5 + 0.02 / 6] if stop == 6 else [0.0])

    def rest(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        train(range(stop, total), model, opt, rank)
        opt.flush()
        return values(model)

    found = resume(saved, core, design, range(stop, total), mlp, rest)
    for rank in range(2):
        assert torch.equal(found[rank], expected[rank]), f"worker {rank}"


def test_what_steers_unless_told_otherwise() -> None:
    assert (found := find_design("local-sgd[h=8]").local) and found.steer > 0
    assert (found := find_design("local-sgd[h=2,steer=0.1]").local) and found.steer == 0.1
    assert (found := find_design("sparseloco[h=15,codec_down=blocktopk[k=148]]").local) and found.steer > 0
    for name in (
        "local-sgd[h=2]",
        "local-sgd[h=4,fragments=2]",
        "local-sgd[h=4,delay=1]",
        "local-sgd[h=4,outer_momentum=0.3]",
        "sparseloco[h=2]",
        "sparseloco[steer=0]",
        "sparseloco[reduce=mean]",
        "update",
    ):
        assert (found := find_design(name).local) and found.steer == 0, name


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ("codec=int8", 0.6),
        ("codec=topk", 0.0),
        ("codec=blocktopk[k=32],reduce=mean-of-senders", 0.0),
        ("codec_down=topk", 0.0),
        ("codec=topk,steer=0.3", 0.3),
    ],
)
def test_what_waited_for_many_rounds_leads_no_momentum_unless_asked_to(options: str, share: float) -> None:
    local = find_design(f"local-sgd[h=4,{options}]").local
    assert local is not None and local.steer == share


def test_an_overflow_counts_no_step() -> None:
    """As a `GradScaler` tells it: the worker's optimizer does not step."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> Any:
        inner_step(model, opt, rank, 0)
        x, y = batch(rank, 1)
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        opt.grad_scale, opt.found_inf = torch.tensor(1.0), torch.tensor(1.0)  # type: ignore[attr-defined]
        opt.step()
        return opt.state_dict()["steering"]["rates"]

    found, _ = run_cluster(mlp, train, workers=1, optimizer=adamw, design="local-sgd[h=4]")
    assert found == [[0.01]]


def test_a_round_that_flush_ends_counts_no_more() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> Any:
        for step in range(6):
            inner_step(model, opt, rank, step)
        before = opt.state_dict()["steering"]["rates"]
        opt.flush()
        return before, opt.state_dict()["steering"]["rates"]

    [(before, after)], _ = run_cluster(mlp, train, workers=1, optimizer=adamw, design="local-sgd[h=4]")
    assert before == [0.02] and after == [0.0]


def test_parameters_without_gradients_have_no_moments_to_steer() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> Any:
        model[0].weight.requires_grad_(False)  # type: ignore[index]  # frozen before any step
        for step in range(9):
            inner_step(model, opt, rank, step)
        opt.flush()
        return model[0].weight in opt.state, values(model)  # type: ignore[index]

    found, _ = run_cluster(mlp, train, workers=2, optimizer=adamw, design="local-sgd[h=4]")
    assert [known for known, _ in found] == [False, False]
    assert torch.equal(found[0][1], found[1][1]) and torch.isfinite(found[0][1]).all()


def test_a_round_without_a_worker_steers_it_nowhere() -> None:
    """Its parameters hold NaN: it goes on from the others', with moments that are finite."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        for step in range(12):
            if rank == 1 and step == 6:
                with torch.no_grad():
                    next(iter(model.parameters())).fill_(float("nan"))
            inner_step(model, opt, rank, step)
        opt.sync()
        return torch.cat([opt.state[each]["exp_avg"].reshape(-1) for each in model.parameters()])

    with pytest.warns(UserWarning, match="this exchange goes without this worker"):
        found, _ = run_cluster(mlp, train, workers=2, optimizer=adamw, design="local-sgd[h=4]")
    assert all(torch.isfinite(each).all() for each in found)


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_moments_of_any_layout_and_type(dtype: torch.dtype, within: float) -> None:
    def convolution(layout: torch.memory_format) -> Any:
        def make(_rank: int) -> nn.Module:
            torch.manual_seed(0)
            layers = nn.Sequential(nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 8, 2), nn.Flatten(), nn.Linear(8, 3))
            return layers.to(dtype).to(memory_format=layout)  # type: ignore[call-overload, no-any-return]

        return make

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        for step in range(9):
            x, y = batch(rank, step)
            opt.zero_grad()
            nn.functional.cross_entropy(model(x.to(dtype)).float(), y).backward()  # type: ignore[no-untyped-call]
            opt.step()
        opt.flush()
        return values(model)

    layouts = (torch.contiguous_format, torch.channels_last)
    plain, last = (
        run_cluster(convolution(layout), train, workers=2, optimizer=adamw, design="local-sgd[h=4,codec=fp32]")[0][0]
        for layout in layouts
    )
    torch.testing.assert_close(last, plain, rtol=within, atol=within)
    unsteered, _ = run_cluster(
        convolution(layouts[0]), train, workers=2, optimizer=adamw, design="local-sgd[h=4,codec=fp32,steer=0]"
    )
    assert not torch.equal(plain, unsteered[0])


def test_what_leads_in_one_pass_is_what_torchs_operations_lead_by() -> None:
    """Channels last has another order in memory, and is left to torch."""
    for memory in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(8, 6, 3, 3))
        adam = torch.optim.AdamW([parameter], lr=0.02)
        for _ in range(3):
            parameter.grad = torch.randn_like(parameter)
            adam.step()
        state = adam.state[parameter]
        state["exp_avg_sq"] = state["exp_avg_sq"].to(memory_format=memory)
        steering = Steering([adam], 0.6, [{"lr": 1.0}])
        steering.stepped()
        steering.pushed()
        before = parameter.detach() + 0.01 * torch.randn_like(parameter)
        partition = Partition(0, 0, parameter.numel())
        tensor = WorkerTensor(PlannedTensor("weight", parameter, False, codec("fp32"), ((partition, 0),)))
        leads, own = steering.leads([tensor]), state["exp_avg"].clone()
        steering.updated([tensor], [before.reshape(-1).clone()])
        assert not torch.equal(state["exp_avg"], own)
        if memory is torch.channels_last:
            assert leads is None
            continue
        assert leads is not None
        [lead] = leads
        assert lead is not None
        assert lead.first is state["exp_avg"] and lead.second is state["exp_avg_sq"]
        after = parameter.detach()
        change = before - after - lead.decay * after
        moment = (lead.second.sqrt() * lead.correction + lead.eps) * change * lead.factor
        torch.testing.assert_close(state["exp_avg"], own.lerp(moment, 0.6))
