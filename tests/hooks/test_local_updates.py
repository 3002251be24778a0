"""Local updates through the whole stack: against plain torch by hand, replicas, resuming, void rounds, refusals."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.hooks.cluster import run_cluster, start_server
from thinwire.errors import ConfigError, NonFiniteError, ProtocolError
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.local_optimizer import LocalUpdateOptimizer
from thinwire.policies.designs import design as find_design
from thinwire.server.core import ServerCore

torch.set_num_threads(1)
WORKERS = 3


def mlp(_rank: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40, bias=False), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 3))


def wide(_rank: int) -> nn.Module:
    """Its matrices are large enough for `blocktopk`."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 3))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, (x[:, :3] + x[:, 3:6]).argmax(1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def inner_optimizer(design: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return sgd if design.startswith("demo") else adamw


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    x, y = batch(rank, step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def values(model: nn.Module) -> torch.Tensor:
    tensors = [*model.parameters(), *(each for each in model.buffers() if each.is_floating_point())]
    return torch.cat([each.detach().float().reshape(-1) for each in tensors]).clone()


def steps(count: int) -> Callable[[int, nn.Module, DistributedOptimizer], torch.Tensor]:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        for step in range(count):
            inner_step(model, opt, rank, step)
        opt.flush()
        return values(model)

    return train


def by_hand(count: int, h: int, outer: Callable[[list[torch.Tensor]], torch.optim.Optimizer]) -> torch.Tensor:
    """DiLoCo in one process with plain torch; buffers are averaged."""
    shared = mlp(0)
    models = [copy.deepcopy(shared) for _ in range(WORKERS)]
    inner = [adamw(model) for model in models]
    outer_optimizer = outer(list(shared.parameters()))
    for step in range(count):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            inner_step(model, optimizer, rank, step)
        if (step + 1) % h and step + 1 < count:
            continue
        with torch.no_grad():
            for name, parameter in shared.named_parameters():
                local = [model.get_parameter(name) for model in models]
                parameter.grad = sum(parameter - each for each in local) / WORKERS  # type: ignore[assignment]
            outer_optimizer.step()
            for name, buffer in shared.named_buffers():
                if buffer.is_floating_point():
                    buffer.copy_(torch.stack([model.get_buffer(name) for model in models]).sum(0) / WORKERS)
            for model in models:
                for mine, theirs in zip(values_of(model), values_of(shared), strict=True):
                    mine.copy_(theirs)
    return values(shared)


def values_of(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *(each for each in model.buffers() if each.is_floating_point())]


def test_uncompressed_it_is_what_plain_torch_does_by_hand() -> None:
    cases: list[tuple[str, int, Callable[..., torch.optim.Optimizer]]] = [
        ("update[codec=fp32]", 1, lambda p: torch.optim.SGD(p, lr=1.0)),
        ("local-sgd[h=4,codec=fp32]", 4, lambda p: torch.optim.SGD(p, lr=1.0)),
        ("diloco[h=5,codec=fp32]", 5, lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)),
    ]
    for design, h, outer in cases:
        found, _ = run_cluster(mlp, steps(13), workers=WORKERS, optimizer=adamw, design=design)
        torch.testing.assert_close(found[0], by_hand(13, h, outer), rtol=1e-4, atol=1e-5, msg=design)


def test_replicas_are_equal_bit_for_bit_and_repeat_over_every_transport() -> None:
    designs = [
        "update",
        "local-sgd[h=4,codec=3lc[s=1.5]]",
        "diloco[h=5]",
        "streaming-diloco[h=6,fragments=3,delay=2]",
        "diloco[h=3,outer=SignSGD,outer_lr=0.001,outer_momentum=0,nesterov=false]",
    ]
    for design in designs:
        runs = [
            run_cluster(mlp, steps(15), workers=WORKERS, optimizer=adamw, design=design, transport=transport)[0]
            for transport in ("memory", "grpc")
        ]
        first = runs[0][0]
        assert torch.isfinite(first).all(), design
        for run in runs:
            for rank, found in enumerate(run):
                assert torch.equal(found, first), f"{design}: worker {rank}"


@pytest.mark.parametrize(
    ("design", "stop"),
    [
        ("diloco[h=3]", 6),
        ("diloco[h=5]", 8),
        ("diloco[h=3,keep=0.5]", 9),
        ("streaming-diloco[h=6,delay=2]", 12),
        ("sparseloco[h=5]", 8),
        ("demo", 7),
        ("demo[h=3]", 7),
    ],
)
def test_resuming_goes_on_bit_for_bit_in_the_middle_of_a_round_too(design: str, stop: int) -> None:
    total = 15
    optimizer = inner_optimizer(design)
    whole, core = run_cluster(wide, steps(total), workers=2, optimizer=optimizer, design=design)
    codecs = {core.plan.codecs[spec.up]["id"] for spec in core.plan.tables} if core.plan else set()
    assert find_design(design).up.id in codecs, "the matrices are too small for what is tested"

    def first(rank: int, model: nn.Module, opt: DistributedOptimizer) -> dict[str, Any]:
        for step in range(stop):
            inner_step(model, opt, rank, step)
        opt.sync()
        return copy.deepcopy({"model": model.state_dict(), "opt": opt.state_dict()})

    saved, core = run_cluster(wide, first, workers=2, optimizer=optimizer, design=design)
    found = resume(saved, core, design, range(stop, total), wide)
    for rank in range(2):
        assert torch.equal(found[rank], whole[rank]), f"worker {rank}"


def resume(
    saved: list[dict[str, Any]],
    core: ServerCore,
    design: str,
    those: range,
    make: Callable[[int], nn.Module] = mlp,
) -> list[torch.Tensor]:
    """Workers and a shard go on from what they saved."""
    again = ServerCore()
    again.load_state_dict(core.state_dict())
    server, address = start_server(again, "memory")

    def work(rank: int) -> torch.Tensor:
        model = make(rank)
        model.load_state_dict(saved[rank]["model"])
        place: dict[str, Any] = {"server": address(), "rank": rank, "workers": len(saved), "timeout_s": 30}
        optimizer = inner_optimizer(design)(model)
        with tw.distribute(model, optimizer, design=design, resume=saved[rank]["opt"], **place) as opt:
            for step in those:
                inner_step(model, opt, rank, step)
            opt.flush()
            return values(model)

    with server, ThreadPoolExecutor(len(saved)) as pool:
        return list(pool.map(work, range(len(saved))))


def test_a_resumed_worker_with_other_settings_is_told_what_differs() -> None:
    def first(rank: int, model: nn.Module, opt: DistributedOptimizer) -> dict[str, Any]:
        steps(4)(rank, model, opt)
        return {"model": model.state_dict(), "opt": opt.state_dict()}

    [saved], core = run_cluster(wide, first, workers=1, optimizer=adamw, design="sparseloco[h=2]")
    cases: list[tuple[str, int, type[Exception], str]] = [
        ("sparseloco[h=4]", 1, ConfigError, "state is of sync_every=2 and this training has sync_every=4: resume with"),
        ("sparseloco[h=2,fragments=2]", 1, ConfigError, "state is of fragments=1 and this training has fragments=2"),
        ("sparseloco[h=2,outer_lr=0.5]", 1, ConfigError, "state is of outer_lr=0.65 and this training has"),
        ("sparseloco[h=2,reduce=mean]", 1, ProtocolError, "reduce: this worker plans mean, the others clipped-mean"),
        (
            "sparseloco[h=2]",
            2,
            ProtocolError,
            "expects 2 workers, the others 1: a training goes on, and resumes, with",
        ),
    ]
    for design, workers, kind, expected in cases:
        with pytest.raises(kind, match=expected):
            resume([saved] * workers, core, design, range(4, 5), wide)
    assert torch.isfinite(resume([saved], core, "sparseloco[h=2]", range(4, 5), wide)[0]).all(), "nothing was lost"


# ---- rounds without a worker


def poisoned(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[torch.Tensor, float]:
    """Worker 1's gradients are NaN in inner step 4, and so are its parameters then; everybody goes on."""
    for step in range(12):
        x, y = batch(rank, step)
        opt.zero_grad()
        nan = torch.nan if (rank, step) == (1, 4) else 1
        (nan * nn.functional.cross_entropy(model(x), y)).backward()  # type: ignore[no-untyped-call]
        opt.step()
    opt.flush()
    return values(model), opt.traffic().get("void_rounds", 0.0)


@pytest.mark.filterwarnings("ignore:worker 1. '0.weight' holds NaN or Inf after inner step")
def test_a_worker_whose_parameters_are_not_finite_sits_out_a_round() -> None:
    for design in ("local-sgd[h=3]", "sparseloco[h=3]", "demo"):
        results, _ = run_cluster(wide, poisoned, workers=WORKERS, optimizer=inner_optimizer(design), design=design)
        assert [void for _, void in results] == [0, 1, 0], design
        for weights, _ in results:
            assert torch.isfinite(weights).all() and torch.equal(weights, results[0][0]), design


def test_it_ends_the_training_where_the_design_says_so() -> None:
    with pytest.raises(NonFiniteError, match=r"local parameters of '0.weight' hold NaN or Inf after inner step 5"):
        run_cluster(mlp, poisoned, workers=WORKERS, optimizer=adamw, design="local-sgd[h=3,nonfinite=raise]")


# ---- what may differ, and what may not


def test_workers_agree_on_the_timetable() -> None:
    for other, expected in (
        (
            "diloco[h=4]",
            r"h, inner steps between exchanges: this worker plans local\[steps=[34]\], the others local\[steps=[34]\]",
        ),
        ("diloco[h=3,fragments=2]", "local: this worker plans fragments="),
        ("diloco[h=3,outer_lr=0.5]", ""),
    ):
        designs = ["diloco[h=3]", other]
        server, address = start_server(ServerCore(), "memory")

        def work(rank: int, designs: list[str] = designs, address: Any = address) -> None:
            model = mlp(rank)
            place: dict[str, Any] = {"server": address(), "rank": rank, "workers": 2, "timeout_s": 3}
            with tw.distribute(model, adamw(model), design=designs[rank], **place) as opt:
                steps(3)(rank, model, opt)

        with server, ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(work, rank) for rank in range(2)]
            errors = [future.exception() for future in futures]
        if expected:
            # The one that came first waits for a second worker, in vain.
            assert any(isinstance(e, ProtocolError) and re.search(expected, str(e)) for e in errors), (other, errors)
        else:  # the outer rate is worker 0's at every exchange, as any rate is
            assert errors == [None, None], errors


def test_designs_say_what_is_wrong_with_their_options() -> None:
    for name, expected in (
        ("diloco[h=0]", "h is 0; it must be a whole number of at least 1"),
        ("diloco[h=4,fragments=5]", "fragments is 5; it must be a whole number in 1 … 4"),
        ("diloco[h=4,delay=4]", "delay is 4; it must be a whole number in 0 … 3"),
        ("diloco[keep=1.0]", "keep is 1.0"),
        ("local-sgd[keep_unsent=1.5]", "keep_unsent is 1.5; it is a number from 0 to 1"),
        ("diloco[outer_lr=0]", "outer_lr is 0"),
        ("diloco[outer=Adam]", "outer is 'Adam'; there are SGD and SignSGD"),
        (
            "diloco[outer_speed=3]",
            "unknown option 'outer_speed'; local updates have h, .*outer, outer_lr, .*and their codec 3lc has .*spars",
        ),
        ("local-sgd[h=2,nesterov=true]", "nesterov needs an outer_momentum"),
    ):
        with pytest.raises(ConfigError, match=expected):
            find_design(name)
    with pytest.raises(ConfigError, match="trains locally for 4 steps: its consistency is"):
        find_design("local-sgd[h=4]", consistency="bsp")


def test_parameters_frozen_midway_and_other_dtypes_and_unused_ones() -> None:
    def half(rank: int) -> nn.Module:
        return wide(rank).to(torch.bfloat16)

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        for step in range(9):
            if step == 4:
                next(model.parameters()).requires_grad_(False)
            x, y = batch(rank, step)
            opt.zero_grad()
            nn.functional.cross_entropy(model(x.to(torch.bfloat16)).float(), y).backward()  # type: ignore[no-untyped-call]
            opt.step()
        opt.flush()
        return values(model)

    for design in ("local-sgd[h=2]", "streaming-diloco[h=4,fragments=2]", "sparseloco[h=2]", "demo"):
        found, _ = run_cluster(half, train, workers=2, optimizer=inner_optimizer(design), design=design)
        assert torch.equal(*found), design
        assert not torch.equal(found[0], values(half(0))), design


def test_shared_weights_are_everybodys_and_the_local_ones_come_back() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[torch.Tensor, ...]:
        assert isinstance(opt, LocalUpdateOptimizer)
        for step in range(5):
            inner_step(model, opt, rank, step)
        before = values(model)
        with opt.shared_weights():
            shared = values(model)
        return before, shared, values(model)

    results, _ = run_cluster(mlp, train, workers=2, optimizer=adamw, design="local-sgd[h=3]")
    (mine, shared, after), (theirs, shared_too, _) = results
    assert torch.equal(shared, shared_too) and torch.equal(mine, after)
    assert not torch.equal(mine, theirs) and not torch.equal(mine, shared)


def test_what_was_not_sent_stays_in_the_local_parameters() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        for step in range(6):
            inner_step(model, opt, rank, step)
        opt.sync()
        local = model.get_parameter("0.weight").detach().clone()
        with opt.shared_weights():
            shared = model.get_parameter("0.weight").detach().clone()
        unsent = opt.state_dict()["contexts"]["0.weight"]["residual"].view(shared.shape)
        assert float(unsent.abs().max()) > 0
        torch.testing.assert_close(local, shared - 0.5 * unsent)
        opt.flush()
        return values(model)

    for design in ("update[keep_unsent=0.5]", "local-sgd[h=3,keep_unsent=0.5]"):
        found, _ = run_cluster(mlp, train, workers=WORKERS, optimizer=adamw, design=design)
        assert all(torch.equal(each, found[0]) for each in found), "at the end all have the shared ones"


def test_a_grad_scalers_skipped_steps_count() -> None:
    """A step with an overflow changes nothing, and every worker's H steps stay H steps."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(6):
            x, y = batch(rank, step)
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            overflow = torch.inf if (rank, step) == (1, 2) else 1
            scaler.scale(loss * overflow).backward()  # type: ignore[no-untyped-call]
            scaler.step(opt)
            scaler.update()
        assert opt.steps_done == 6
        opt.flush()
        return values(model)

    found, _ = run_cluster(mlp, train, workers=2, optimizer=adamw, design="local-sgd[h=2]")
    assert torch.isfinite(found[0]).all() and torch.equal(*found)


class Offloading(torch.optim.SGD):
    """Keeps some of its state on another device, and knows what to do with it."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("elsewhere", torch.zeros_like(parameter, device="meta"))
        return super().step(closure)


@pytest.mark.filterwarnings("ignore:worker 1. '0.weight' holds NaN or Inf after inner step")
def test_optimizer_state_on_another_device() -> None:
    def offloading(model: nn.Module) -> torch.optim.Optimizer:
        return Offloading(model.parameters(), lr=0.01, momentum=0.9)

    results, _ = run_cluster(mlp, poisoned, workers=2, optimizer=offloading, design="local-sgd[h=3]")
    assert torch.isfinite(results[0][0]).all() and torch.equal(results[0][0], results[1][0])

    model = mlp(0)
    optimizer = adamw(model)
    inner_step(model, optimizer, 0, 0)
    moments = optimizer.state[next(model.parameters())]
    moments["exp_avg"] = moments["exp_avg"].to("meta")
    with pytest.raises(
        ConfigError, match=r"'exp_avg' of a parameter of shape \(40, 12\) is on meta and the parameter on cpu"
    ):
        tw.distribute(model, optimizer, server="grpc://127.0.0.1:1", design="update")
