"""Updates lengthened by what all workers' mean gradient would have made of them: norms, steps by hand, refusals."""

from __future__ import annotations

import copy
import math
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.hooks.cluster import run_cluster, start_server
from tests.hooks.local_runs import adamw, inner_step, mlp, resume, sgd, steps, values
from torch import nn

import thinwire as tw
from thinwire.codecs import codec
from thinwire.errors import ConfigError
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.lengthening import NAME, SUMS, Lengthening
from thinwire.hooks.local_optimizer import LocalUpdateOptimizer
from thinwire.policies.assignment import Partition
from thinwire.policies.designs import design
from thinwire.server.core import ServerCore
from thinwire.worker.model import PlannedTensor, WorkerTensor

WORKERS = 3
PLAIN = "update[codec=fp32,small=fp32]"
DESIGN = "update[codec=fp32,small=fp32,lengthen=true]"


def pair(shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape)) for shape in shapes]


def test_factors_are_the_root_of_what_chance_adds_to_a_workers_own_gradient() -> None:
    """With n workers, of a gradient that is all chance the root of n, and of one that is all signal 1."""
    shapes, random, workers = [(30, 40), (7,), (50, 33), (5,)], torch.Generator().manual_seed(0), 4
    models = [pair(shapes) for _ in range(workers)]
    found = [Lengthening(torch.optim.AdamW(model), workers=workers, seed=3) for model in models]
    noise = [0.0, 0.0, 1.0, 50.0]
    signal = [torch.randn(shape, generator=random) for shape in shapes]
    for step in range(120):
        for model in models:
            for parameter, mean, share in zip(model, signal, noise, strict=True):
                parameter.grad = mean + share * torch.randn(mean.shape, generator=random)
        for each in found:
            each.stepped(step)
        mean = torch.stack([each.board for each in found]).mean(0)
        for each in found:
            each.board.copy_(mean)
    found[0].stepped(120)
    factors = found[0].factors().tolist()
    assert factors[:2] == pytest.approx([1, 1], abs=0.1)
    assert factors[2] == pytest.approx(math.sqrt(2 / (1 + 1 / workers)), rel=0.1)
    assert factors[3] == pytest.approx(math.sqrt(workers), rel=0.15)
    assert all(torch.equal(each.factors(), found[1].factors()) for each in found[1:])


@pytest.mark.parametrize("maximize", [False, True])
def test_decay_that_adam_adds_to_the_gradient_is_signal(maximize: bool) -> None:
    random, workers = torch.Generator().manual_seed(0), 4
    shape, placed = (30, 40), ((Partition(0, 0, 1200), 0),)
    models = [nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1))) for _ in range(workers)]
    found = []
    for model in models:
        adam = torch.optim.Adam([model], weight_decay=1.0, maximize=maximize)
        found.append(Lengthening(adam, workers=workers, seed=3))
        found[-1].follow([WorkerTensor(PlannedTensor("w", model, False, codec("fp32"), placed))])
    for step in range(120):
        for each, model in zip(found, models, strict=True):
            model.grad = torch.randn(shape, generator=random)
            each.stepped(step)
        mean = torch.stack([each.board for each in found]).mean(0)
        for each in found:
            each.board.copy_(mean)
    found[0].stepped(120)
    [factor] = found[0].factors().tolist()
    assert factor == pytest.approx(math.sqrt(2 / (1 + 1 / workers)), rel=0.1)


def by_hand(count: int) -> torch.Tensor:
    """The mean of what AdamW changed at each worker, lengthened, with plain torch."""
    shared = mlp(0)
    models = [copy.deepcopy(shared) for _ in range(WORKERS)]
    inner = [adamw(model) for model in models]
    norms = {name: torch.zeros(2) for name, _ in shared.named_parameters()}
    for step in range(count):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            inner_step(model, optimizer, rank, step)
        with torch.no_grad():
            for name, parameter in shared.named_parameters():
                local = [model.get_parameter(name) for model in models]
                of_mean, of_each = norms[name].tolist() if step else (1.0, 1.0)
                factor = min(max(of_mean / of_each, 1 / WORKERS), 1.0) ** -0.5
                gradients = [each.grad for each in local if each.grad is not None]
                told = [
                    torch.stack([sums(each, step) for each in gradients]).mean(0).square().sum(),
                    torch.stack([each.square().sum() for each in gradients]).mean(),
                ]
                norms[name].lerp_(torch.stack(told), 1 - inner[0].param_groups[0]["betas"][1])
                [group] = inner[0].param_groups
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(factor * torch.stack([parameter - each for each in local]).mean(0))
            for name, buffer in shared.named_buffers():
                if buffer.is_floating_point():
                    buffer.copy_(torch.stack([model.get_buffer(name) for model in models]).mean(0))
            for model in models:
                model.load_state_dict(shared.state_dict())
    return values(shared)


def sums(gradient: torch.Tensor, step: int) -> torch.Tensor:
    """Of a model whose largest parameter has 480 values, which are 30 rows."""
    rows = -(-gradient.numel() // SUMS)
    generator = torch.Generator().manual_seed(step)
    signs = torch.randint(0, 2, (30,), generator=generator, dtype=torch.int8)[:rows].float() * 2 - 1
    padded = nn.functional.pad(gradient.reshape(-1), (0, rows * SUMS - gradient.numel()))
    return signs @ padded.view(rows, SUMS)


def test_uncompressed_it_is_what_plain_torch_does_by_hand() -> None:
    found, _ = run_cluster(mlp, steps(13), workers=WORKERS, optimizer=adamw, design=DESIGN)
    torch.testing.assert_close(found[0], by_hand(13), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(each, found[0]) for each in found)
    plain, _ = run_cluster(mlp, steps(13), workers=WORKERS, optimizer=adamw, design="update[codec=fp32,small=fp32]")
    assert not torch.allclose(found[0], plain[0], rtol=1e-2)


def test_a_parameter_without_a_gradient_stays_as_it_is() -> None:
    """AdamW does not decay it either: there is nothing to lengthen."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[torch.Tensor, torch.Tensor]:
        for step in range(12):
            inner_step(model, opt, rank, step)
        opt.sync()
        still = next(model.parameters())
        before = still.detach().clone()
        still.requires_grad_(False)
        for step in range(12, 24):
            inner_step(model, opt, rank, step)
        opt.flush()
        return before, still.detach().clone()

    found, _ = run_cluster(mlp, train, workers=WORKERS, optimizer=adamw, design=DESIGN)
    for before, after in found:
        torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-7)


def test_betas_of_a_state_that_was_loaded_count() -> None:
    """torch makes new groups of them."""
    [parameter] = model = pair([(3,)])
    optimizer = torch.optim.AdamW(model, betas=(0.9, 0.95))
    lengthening = Lengthening(optimizer, workers=2, seed=0)
    state = optimizer.state_dict()
    state["param_groups"][0]["betas"] = (0.9, 0.5)
    optimizer.load_state_dict(state)
    parameter.grad = torch.ones(3)
    lengthening.stepped(0)
    lengthening.stepped(1)  # takes what the first has told
    assert float(lengthening.state_dict()["norms"][1]) == pytest.approx(0.5 * 3)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_what_torch_makes_tensors_of_by_default_changes_nothing(default: torch.dtype) -> None:
    model, random = nn.Linear(30, 30), torch.Generator().manual_seed(0)
    gradients = [[torch.randn(each.shape, generator=random) for each in model.parameters()] for _ in range(6)]
    found = []
    for dtype in (torch.float32, default):
        torch.set_default_dtype(dtype)
        try:
            lengthening = Lengthening(adamw(model), workers=4, seed=0)
            for clock, those in enumerate(gradients):
                for parameter, gradient in zip(model.parameters(), those, strict=True):
                    parameter.grad = gradient
                lengthening.stepped(clock)
                lengthening.board[:, :SUMS] *= 0.5  # as the mean over workers makes them shorter
            lengthening.skipped()
            found.append((lengthening.factors(), lengthening.board))
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(found[0][0], found[1][0]) and float(found[0][0].max()) > 1.0
    assert found[1][1].dtype == torch.float32


def test_who_joins_after_exchanges_without_a_step_draws_the_signs_of_all_others() -> None:
    """All gradients are equal, so nothing is to be lengthened; sums of unlike signs would say that all is chance."""
    server, address = start_server(ServerCore(min_workers=2), "memory")
    factors: list[torch.Tensor] = []

    def live(rank: int, dies_at: int = -1) -> None:
        model = mlp(rank)
        connection: Any = address()
        place: dict[str, Any] = {"server": connection, "rank": rank, "workers": 2, "timeout_s": 30}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.9))
        opt = tw.distribute(model, optimizer, design=DESIGN[:-1] + ",settle=3]", **place)
        while opt.clock < 60:
            if opt.steps_done == dies_at:
                opt.sync()
                connection.abort()
                return
            if opt.steps_done == 2:
                opt.flush()
            inner_step(model, opt, 0, opt.clock)
        assert isinstance(opt, LocalUpdateOptimizer) and opt._lengthening is not None
        factors.append(opt._lengthening.factors())
        opt.close()

    with server, ThreadPoolExecutor(2) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, dies = pool.submit(live, 0), pool.submit(live, 1, 5)
        dies.result()
        for each in (first, pool.submit(live, 1)):
            each.result()
    assert all(float(each.mean()) < 1.1 for each in factors)


@pytest.mark.parametrize("old", [False, True])
def test_a_state_without_it_is_refused_by_its_name(old: bool) -> None:
    def first(rank: int, model: nn.Module, opt: DistributedOptimizer) -> dict[str, Any]:
        steps(3)(rank, model, opt)
        return copy.deepcopy({"model": model.state_dict(), "opt": opt.state_dict()})

    saved, core = run_cluster(mlp, first, workers=2, optimizer=adamw, design=PLAIN)
    for each in saved if old else ():
        del each["opt"]["position"]["local"]["lengthen"]  # as states of before there was any
    with pytest.raises(ConfigError, match="the state is of lengthen=False and this training has lengthen=True"):
        resume(saved, core, DESIGN, range(3, 4))
    for each in resume(saved, core, PLAIN, range(3, 4)):
        assert torch.isfinite(each).all()


def test_alone_or_without_adam_nothing_is_lengthened() -> None:
    for make, workers in ((adamw, 1), (sgd, 2)):
        found, core = run_cluster(mlp, steps(4), workers=workers, optimizer=make, design=DESIGN)
        usual, _ = run_cluster(mlp, steps(4), workers=workers, optimizer=make, design=PLAIN)
        assert torch.equal(found[0], usual[0])
        assert core.plan is not None
        assert (NAME in {each.name for each in core.plan.tables}) == (make is adamw), "others may join"


def test_no_parameter_is_called_as_the_table_of_sums_is() -> None:
    def named(_rank: int) -> nn.Module:
        model = nn.Module()
        model.thinwire = nn.Module()
        model.thinwire.gradients = nn.Parameter(torch.ones(4))
        return model

    def train(_rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones(4)
        opt.step()
        opt.flush()

    run_cluster(named, train, workers=2, optimizer=adamw, design="update[lengthen=true]")


def test_the_bound_is_of_those_who_take_part_and_not_of_those_who_were_planned() -> None:
    """Gradients are nearly all chance: of four workers, of which one was planned, steps become twice as long."""
    server, address = start_server(ServerCore(min_workers=1), "memory")
    begun = threading.Event()

    def live(rank: int) -> torch.Tensor:
        random, model = torch.Generator().manual_seed(rank), nn.Linear(30, 30)
        place: dict[str, Any] = {"server": address(), "rank": rank, "workers": 1, "timeout_s": 30}
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.9))
        with tw.distribute(model, optimizer, design=DESIGN, **place) as opt:
            assert isinstance(opt, LocalUpdateOptimizer) and opt._lengthening is not None
            while len(opt.memberships[-1][1]) < 4 or opt.clock < opt.memberships[-1][0] + 40:
                if len(opt.memberships[-1][1]) < 4:
                    time.sleep(0.01)
                for parameter in model.parameters():
                    parameter.grad = torch.randn(parameter.shape, generator=random)
                opt.step()
                opt.sync()
                begun.set()
            return opt._lengthening.factors()

    with server, ThreadPoolExecutor(4) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = pool.submit(live, 0)
        begun.wait(20)
        factors = [each.result() for each in (first, *[pool.submit(live, rank) for rank in (1, 2, 3)])]
    for each in factors:
        assert float(each[0]) == pytest.approx(2.0, rel=0.15)


def test_a_step_that_one_worker_skips_leaves_all_with_the_same_factors() -> None:
    """As a `GradScaler` tells it: what was told before is taken there too, and nothing old is told again."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> list[torch.Tensor]:
        assert isinstance(opt, LocalUpdateOptimizer) and opt._lengthening is not None
        found = []
        for step in range(12):
            if overflows := (rank, step) in ((1, 8), (1, 9)):
                opt.grad_scale, opt.found_inf = torch.tensor(1.0), torch.tensor(1.0)  # type: ignore[attr-defined]
            inner_step(model, opt, rank, step)
            if overflows:
                del opt.grad_scale, opt.found_inf  # type: ignore[attr-defined]
            found.append(opt._lengthening.factors())
        return found

    [one, other], _ = run_cluster(mlp, train, workers=2, optimizer=adamw, design=DESIGN)
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    assert not torch.equal(one[8], one[9]) and not torch.equal(one[9], one[10])


def test_gradients_that_are_not_finite_say_nothing() -> None:
    [parameter] = pair([(20, 3)])
    found = Lengthening(torch.optim.AdamW([parameter]), workers=2, seed=0)
    parameter.grad = torch.full((20, 3), math.inf)
    found.stepped(0)
    assert not found.board.any()
    found.stepped(1)
    assert found.factors().tolist() == [1.0]


def test_parameters_without_values_or_gradients_and_any_seed() -> None:
    model = pair([(0, 3), (4,), (2, 2)])
    found = Lengthening(torch.optim.Adam(model), workers=2, seed=2**70)
    model[0].grad, model[1].grad = torch.zeros(0, 3), torch.ones(4)
    for step in range(3):
        found.stepped(step)
    assert found.factors().tolist()[::2] == [1.0, 1.0] and found.board[1, SUMS] == 4
    assert not found.board[::2].any()
    alone = Lengthening(torch.optim.Adam(model[:1]), workers=2, seed=-1)
    alone.stepped(0)
    assert not alone.board.any()


def test_what_a_dtype_rounds_is_no_step() -> None:
    """A parameter in bfloat16 that had no gradient stays where it is, however much longer steps are made."""
    parameter = nn.Parameter(torch.zeros(400, dtype=torch.bfloat16))
    whole = ((Partition(0, 0, 400), 0),)
    tensor = WorkerTensor(PlannedTensor("w", parameter, state=False, up=codec("fp32"), placed=whole, local=True))
    tensor.values.copy_(torch.randn(400, generator=torch.Generator().manual_seed(0)))
    tensor.write()
    tensor.offset = tensor.values - tensor.local
    began = parameter.detach().clone()
    found = Lengthening(torch.optim.Adam([parameter]), workers=9, seed=0)
    found.follow([tensor])
    found.stepped(0)
    found.board[:, SUMS] = 1.0  # all workers' gradients were chance
    found.stepped(1)
    assert found.factors().tolist() == pytest.approx([3.0])
    assert torch.equal(parameter, began)


@pytest.mark.parametrize("name", ["local-sgd[h=2,lengthen=true]", "update[lengthen=true,keep_unsent=0.5]"])
def test_it_is_of_one_step_alone(name: str) -> None:
    with pytest.raises(ConfigError, match="lengthen: how long one step with the mean gradient would be"):
        design(name)
    with pytest.raises(ConfigError, match="lengthen is 1; it is true or false"):
        design("update[lengthen=1]")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("update[lengthen=true,steer=0.6]", "momenta that are led by steps that were lengthened .*; steer=0 goes with"),
        ("update[lengthen=true,keep=0.5]", "what a worker keeps of its own is nothing that .*; keep=0 goes with it"),
        ("update[lengthen=true,reduce=sum]", "updates are made as long as one of the mean gradient"),
    ],
)
def test_what_does_not_go_with_it_is_refused(name: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"lengthen.*: {expected}"):
        design(name)
