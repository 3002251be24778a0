"""Local updates through the whole stack: against plain torch by hand, replicas, resuming, void rounds."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from tests.hooks.cluster import run_cluster
from tests.hooks.local_runs import adamw, batch, inner_optimizer, inner_step, mlp, resume, sgd, steps, values, wide
from thinwire.errors import NonFiniteError, ProtocolError
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.local_optimizer import LocalUpdateOptimizer
from thinwire.policies.designs import design as find_design

WORKERS = 3
STEER = 0.6
"""Of `local-sgd`, unless it says otherwise."""


def by_hand(
    count: int, h: int, outer: Callable[[list[torch.Tensor]], torch.optim.Optimizer], warmup: int, steer: float = 0.0
) -> torch.Tensor:
    """DiLoCo in one process with plain torch; buffers are averaged, and first moments led by what all did."""
    shared = mlp(0)
    models = [copy.deepcopy(shared) for _ in range(WORKERS)]
    inner = [adamw(model) for model in models]
    outer_optimizer = outer(list(shared.parameters()))
    taken = 0
    for step in range(count):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            inner_step(model, optimizer, rank, step)
        taken += 1
        if step >= warmup and (step + 1 - warmup) % h and step + 1 < count:
            continue
        with torch.no_grad():
            for name, parameter in shared.named_parameters():
                local = [model.get_parameter(name) for model in models]
                parameter.grad = torch.stack([parameter - each for each in local]).sum(0) / WORKERS
            before = {name: parameter.detach().clone() for name, parameter in shared.named_parameters()}
            outer_optimizer.step()
            for name, parameter in shared.named_parameters():
                for model, optimizer in zip(models, inner, strict=True):
                    lead(optimizer, model.get_parameter(name), before[name], parameter, taken, steer)
            taken = 0
            for name, buffer in shared.named_buffers():
                if buffer.is_floating_point():
                    buffer.copy_(torch.stack([model.get_buffer(name) for model in models]).sum(0) / WORKERS)
            for model in models:
                for mine, theirs in zip(values_of(model), values_of(shared), strict=True):
                    mine.copy_(theirs)
    return values(shared)


def lead(
    optimizer: torch.optim.Optimizer,
    parameter: nn.Parameter,
    before: torch.Tensor,
    after: torch.Tensor,
    taken: int,
    steer: float,
) -> None:
    """Replaces a share of AdamW's first moment by one that leads a step where all went, without the decay."""
    [group], state = optimizer.param_groups, optimizer.state[parameter]
    if steer:
        first, second = (1 - beta ** float(state["step"]) for beta in group["betas"])
        root = (state["exp_avg_sq"] / second).sqrt() + group["eps"]
        direction = (before - after) / (taken * group["lr"]) - group["weight_decay"] * after
        state["exp_avg"].lerp_(direction * root * first, steer)


def values_of(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *(each for each in model.buffers() if each.is_floating_point())]


def test_uncompressed_it_is_what_plain_torch_does_by_hand() -> None:
    def plain(p: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(p, lr=1.0)

    def nesterov(p: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)

    cases = [
        ("update[codec=fp32]", 1, 0, plain, 0.0),
        ("local-sgd[h=4,steer=0,codec=fp32]", 4, 0, plain, 0.0),
        ("local-sgd[h=4,codec=fp32]", 4, 0, plain, STEER),
        ("local-sgd[h=4,steer=0.3,warmup=3,codec=fp32]", 4, 3, plain, 0.3),
        ("diloco[h=5,codec=fp32]", 5, 0, nesterov, 0.0),
    ]
    for design, h, warmup, outer, steer in cases:
        found, _ = run_cluster(mlp, steps(13), workers=WORKERS, optimizer=adamw, design=design)
        expected = by_hand(13, h, outer, warmup, steer)
        torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-5, msg=design)


def test_replicas_are_equal_bit_for_bit_and_repeat_over_every_transport() -> None:
    designs = [
        "update",
        "local-sgd[h=4,codec=3lc[s=1.5]]",
        "local-sgd[h=4,settle=2]",
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
        ("update", 8),
        ("diloco[h=3]", 6),
        ("diloco[h=5]", 8),
        ("diloco[h=2,codec=3lc[s=1.75,lag=9]]", 9),
        ("local-sgd[h=4,warmup=5]", 7),
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
        saves: list[tuple[str, Any]] = [("model", model), ("opt", opt)]  # either waits for the last exchange
        return copy.deepcopy({name: each.state_dict() for name, each in (saves if rank else reversed(saves))})

    saved, core = run_cluster(wide, first, workers=2, optimizer=optimizer, design=design)
    found = resume(saved, core, design, range(stop, total), wide)
    for rank in range(2):
        assert torch.equal(found[rank], whole[rank]), f"worker {rank}"


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
    with pytest.raises(
        (NonFiniteError, ProtocolError), match=r"local parameters of '0.weight' hold NaN or Inf after inner step 5"
    ):
        run_cluster(mlp, poisoned, workers=WORKERS, optimizer=adamw, design="local-sgd[h=3,nonfinite=raise]")


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


def test_the_outer_optimizers_groups_are_there_for_type_checkers_and_empty_without_one() -> None:
    def rates(rank: int, model: nn.Module, opt: DistributedOptimizer) -> list[float]:
        return [group["lr"] for group in opt.outer_groups]

    found = run_cluster(mlp, rates, workers=1, optimizer=adamw, design="diloco[h=3]")[0]
    assert found == [[0.7, 1.0]]  # of weights, and buffers
    assert run_cluster(mlp, rates, workers=1)[0] == [[]]


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


def test_what_waits_in_residuals_is_exchanged_at_the_end() -> None:
    """Nothing is trained in between: what was sent and what waits add up to the same, and ever less of it waits."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[torch.Tensor, torch.Tensor, int]:
        for step in range(5):
            inner_step(model, opt, rank, step)
        opt.flush()
        residual = opt.state_dict()["contexts"]["0.weight"]["residual"]
        return values(model), residual.flatten().clone(), opt.clock

    plain = "outer_lr=1.0,outer_momentum=0,nesterov=false"
    streaming = f"streaming-diloco[h=6,fragments=3,delay=2,{plain},codec_down=fp32,{{}}]"
    for base in ("update[codec_down=fp32,{}]", "local-sgd[h=3,codec_down=fp32,{}]", streaming):
        waits, all_in_all, exchanges = [], [], []
        for settle in (0, 1, 4):
            design = base.format(f"settle={settle}")
            found, _ = run_cluster(mlp, train, workers=WORKERS, optimizer=adamw, design=design)
            assert all(torch.equal(each, found[0][0]) for each, _, _ in found), design
            unsent = torch.stack([residual for _, residual, _ in found])
            waits.append(float(unsent.norm()))
            all_in_all.append(found[0][0][: unsent.shape[1]] - unsent.mean(0))
            exchanges.append(found[0][2])
        assert 0 < waits[2] < 0.5 * waits[1] < 0.5 * waits[0], base
        torch.testing.assert_close(all_in_all[1:], [all_in_all[0]] * 2, rtol=1e-5, atol=1e-6, msg=base)
        assert [each - exchanges[0] for each in exchanges] == [0, 1, 4], base


@pytest.mark.parametrize("stop", [7, 8, 9, 10])
def test_a_round_that_ends_before_an_answer_was_due_pushes_nothing_twice(stop: int) -> None:
    """What was pushed after six steps comes to the shared parameters once, or waits in the residual."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[torch.Tensor, torch.Tensor]:
        weight = model.get_parameter("0.weight")
        began = weight.detach().clone()
        for step in range(stop):
            opt.zero_grad()
            (weight * -direction * 2.0**step).sum().backward()  # type: ignore[no-untyped-call]
            opt.step()
        opt.flush()
        return weight.detach() - began, opt.state_dict()["contexts"]["0.weight"]["residual"].view(weight.shape)

    direction = torch.rand(mlp(0).get_parameter("0.weight").shape) + 0.1
    plain = "outer_lr=1,outer_momentum=0,nesterov=false,codec_down=fp32"
    design = f"diloco[h=6,delay=4,codec=topk,fraction=0.1,settle=0,{plain}]"
    [(moved, waits)], _ = run_cluster(
        mlp, train, workers=1, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0), design=design
    )
    assert float(waits.abs().max()) > 0
    torch.testing.assert_close(moved - waits, (2.0**6 - 1) * direction, rtol=1e-5, atol=1e-4)


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


@pytest.mark.parametrize("design", ["local-sgd[h=2]", "3lc"])
def test_a_copy_of_the_model_takes_part_in_nothing(design: str) -> None:
    """Such as an average of weights, and a model that is saved whole."""

    def copying(rank: int, model: nn.Module, opt: DistributedOptimizer) -> torch.Tensor:
        average = AveragedModel(model)
        kept = io.BytesIO()
        for step in range(5):
            inner_step(model, opt, rank, step)
            average.update_parameters(model)
            average(batch(rank, step)[0]).sum().backward()
            torch.save(model, kept)
            kept.seek(0)
            torch.load(kept, weights_only=False)(batch(rank, step)[0])
            kept.seek(0)
        opt.flush()
        return values(model)

    [copied, _], _ = run_cluster(mlp, copying, workers=2, optimizer=sgd, design=design)
    [expected, _], _ = run_cluster(mlp, steps(5), workers=2, optimizer=sgd, design=design)
    assert torch.equal(copied, expected)


@pytest.mark.parametrize("design", ["local-sgd[h=4]", "local-sgd[h=2]", "update"])
def test_parameters_of_no_values_and_of_one_are_exchanged_with_the_others(design: str) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp(0)
            self.none, self.rows = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0, 7))
            self.one = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layers(x) * self.one + self.none.sum() + self.rows.sum()
            return out

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[torch.Tensor, float]:
        for step in range(9):
            inner_step(model, opt, rank, step)
        opt.flush()
        return values(model), float(model.one.detach())  # type: ignore[operator]

    [(first, one), (second, _)], _ = run_cluster(
        lambda _: Odd(), train, workers=2, optimizer=adamw, design=design, min_numel=16
    )
    assert torch.equal(first, second) and first.isfinite().all() and one != 1
