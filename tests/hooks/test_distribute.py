"""Training through the parameter server, whole: hooks, cores, transports."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.hooks.cluster import run_cluster
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.policies.consistency import consistency

torch.set_num_threads(1)


def mlp(rank: int) -> nn.Module:
    """Another model on every rank: the initial weights of rank 0 must win."""
    generator = torch.Generator().manual_seed(rank)
    model = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 12, generator=generator)
    return x, (x[:, :3] + x[:, 3:6]).argmax(1)


def steps(count: int) -> Callable[[int, nn.Module, DistributedOptimizer], dict[str, torch.Tensor]]:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> dict[str, torch.Tensor]:
        for step in range(count):
            x, y = batch(rank, step)
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            opt.step()
        opt.sync()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    return train


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def alone(count: int, workers: int, make: Callable[[Any], torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """The same training in one process with plain torch: gradients averaged by hand."""
    model = mlp(0)
    optimizer = make(model)
    for step in range(count):
        optimizer.zero_grad()
        for rank in range(workers):
            x, y = batch(rank, step)
            (nn.functional.cross_entropy(model(x), y) / workers).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
}


def test_uncompressed_training_equals_training_alone() -> None:
    for name, make in OPTIMIZERS.items():
        results, core = run_cluster(mlp, steps(12), workers=3, codec="fp32", optimizer=make)
        expected = alone(12, 3, make)
        for result in results:
            for key in expected:
                torch.testing.assert_close(result[key], expected[key], rtol=1e-4, atol=1e-5, msg=f"{name}: {key}")
        assert core.finished


def test_transports_give_the_same_bits_and_workers_hold_the_servers_replica() -> None:
    for codec in ("fp32", "3lc", "int8"):
        memory, core = run_cluster(mlp, steps(6), workers=3, codec=codec, transport="memory")
        grpc, _ = run_cluster(mlp, steps(6), workers=3, codec=codec, transport="grpc")
        for a, b in zip(memory, grpc, strict=True):
            assert equal(a, b), codec
            for table in core.tables:
                assert torch.equal(a[table.spec.name], torch.from_numpy(table.replica)), (codec, table.spec.name)


def test_3lc_keeps_what_was_not_sent() -> None:
    """w_server − w_worker is the pull's residual, and it is not zero (3LC §3)."""
    _, core = run_cluster(mlp, steps(9), workers=2, codec="3lc", sparsity=1.75)
    weight = next(table for table in core.tables if table.spec.name == "0.weight")
    assert abs(weight.residual).max() > 0
    assert abs(weight.residual).max() < abs(weight.values).max()


def test_gradients_and_not_weights_decide_about_the_bits_of_entropys_rms_mode() -> None:
    """A gradient of 200 everywhere asks for 14 bits; the weights, which are all below 1, would ask for 7."""

    def make(rank: int) -> nn.Module:
        torch.manual_seed(rank)
        return nn.Linear(20, 20, bias=False)

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> int:
        for scale in (120.0, 256.0):  # whose root mean square is 200
            opt.zero_grad()
            (scale * model(torch.ones(1, 20))).sum().backward()
            opt.step()
        return int(opt.traffic()["payload_bytes_push"])

    pushed, _ = run_cluster(make, train, design="entropy[mode=rms]", steps_per_epoch=2)
    assert pushed == [1 + 400 * 14 // 8] * 2


def test_overlap_does_not_change_the_weights() -> None:
    early, _ = run_cluster(mlp, steps(6), workers=2, codec="3lc", chunk_nbytes=1)
    late, _ = run_cluster(mlp, steps(6), workers=2, codec="3lc", overlap=False)
    assert equal(early[0], late[0])


@pytest.mark.parametrize("overlap", [True, False])
def test_gradient_accumulation(overlap: bool) -> None:
    """Gradients that leave at step() add up without a block."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> dict[str, torch.Tensor]:
        for step in range(4):
            x, y = batch(rank, step)
            opt.zero_grad()
            with opt.no_sync() if overlap else nullcontext():
                (nn.functional.cross_entropy(model(x[:4]), y[:4]) / 2).backward()  # type: ignore[no-untyped-call]
            (nn.functional.cross_entropy(model(x[4:]), y[4:]) / 2).backward()  # type: ignore[no-untyped-call]
            opt.step()
        opt.sync()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    split, _ = run_cluster(mlp, train, workers=2, codec="fp32", overlap=overlap)
    whole, _ = run_cluster(mlp, steps(4), workers=2, codec="fp32")
    for key in whole[0]:
        torch.testing.assert_close(split[0][key], whole[0][key], rtol=1e-4, atol=1e-5)


def test_a_second_backward_without_no_sync_is_refused() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        x, y = batch(rank, 0)
        for _ in range(2):
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]

    with pytest.raises(tw.ProtocolError, match="no_sync"):
        run_cluster(mlp, train, workers=1)


def test_schedulers_move_the_servers_rate() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> dict[str, torch.Tensor]:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=5)
        for step in range(5):
            x, y = batch(rank, step)
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            opt.step()
            scheduler.step()
        opt.sync()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    results, _ = run_cluster(mlp, train, workers=2, codec="fp32")
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    for step in range(5):
        optimizer.zero_grad()
        for rank in range(2):
            x, y = batch(rank, step)
            (nn.functional.cross_entropy(model(x), y) / 2).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(results[0][name], parameter.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("design", ["fp32", "update[codec=fp32]"])
@pytest.mark.parametrize("early", [False, True])
def test_a_scheduler_of_the_workers_own_optimizer(design: str, early: bool) -> None:
    """One that is to resume is made before the training; torch warns where it steps before the optimizer alone."""
    model = mlp(0)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1)

    def train(rank: int, _model: nn.Module, opt: DistributedOptimizer) -> float:
        if early:
            scheduler.step()
        for _ in range(2):
            steps(1)(rank, model, opt)
            scheduler.step()
        return float(opt.param_groups[0]["lr"])

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        [rate], _ = run_cluster(lambda _: model, train, workers=1, optimizer=lambda _: inner, design=design)
    assert ["before `optimizer.step()`" in str(each.message) for each in seen] == [True] * early
    assert rate == pytest.approx(0.001 / 10**early)


class Odd(nn.Module):
    """A parameter of the root, one that a sibling uses without calling its module, one that is never used, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(12))
        self.hidden = nn.Linear(12, 16)
        self.borrowed = nn.Linear(16, 3)
        self.unused = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.hidden(x * self.scale)).relu()
        x = self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0]
        return nn.functional.linear(x, self.borrowed.weight, self.borrowed.bias)


def odd(rank: int) -> nn.Module:
    generator = torch.Generator().manual_seed(rank)
    model = Odd()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def test_parameters_in_odd_places_and_batch_norm() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> dict[str, torch.Tensor]:
        steps(7)(rank, model, opt)
        return {name: t.detach().clone() for name, t in model.state_dict().items()}

    results, _ = run_cluster(odd, train, workers=2, codec="3lc", state_interval=3)
    names = [name for name, _ in odd(0).named_parameters()]
    for name in names:
        assert torch.equal(results[0][name], results[1][name]), name
    assert torch.equal(results[0]["unused.weight"], dict(odd(0).named_parameters())["unused.weight"])
    assert not torch.equal(results[0]["borrowed.weight"], dict(odd(0).named_parameters())["borrowed.weight"])
    # The statistics of worker 0 reached worker 1 after step 6 (steps 0, 3, 6 send them).
    assert torch.equal(results[0]["norm.running_mean"], results[1]["norm.running_mean"])


def test_other_dtypes_keep_replicas_equal() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> dict[str, torch.Tensor]:
        dtype = next(model.parameters()).dtype
        for step in range(4):
            x, y = batch(rank, step)
            opt.zero_grad()
            nn.functional.cross_entropy(model(x.to(dtype)).float(), y).backward()  # type: ignore[no-untyped-call]
            opt.step()
        opt.sync()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    makes: dict[torch.dtype, Callable[[int], nn.Module]] = {
        torch.bfloat16: lambda rank: mlp(rank).bfloat16(),
        torch.float16: lambda rank: mlp(rank).half(),
        torch.float64: lambda rank: mlp(rank).double(),
    }
    for dtype, make in makes.items():
        results, _ = run_cluster(make, train, workers=2, codec="3lc")
        assert equal(results[0], results[1]), dtype
        assert results[0]["0.weight"].dtype == dtype
        assert not torch.equal(results[0]["0.weight"], dict(make(0).named_parameters())["0.weight"])


def test_nan_names_the_parameter_and_keeps_the_residual() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        steps(2)(rank, model, opt)
        before = opt.state_dict()["contexts"]["0.weight"]["residual"]
        opt.zero_grad()
        x, y = batch(rank, 3)
        x[0, 0] = float("nan")
        try:
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        finally:
            assert torch.equal(before, opt.state_dict()["contexts"]["0.weight"]["residual"])

    with pytest.raises(tw.NonFiniteError, match=r"gradient of (0|2)\.(weight|bias): .*NaN"):
        run_cluster(mlp, train, workers=1)


def test_another_shape_is_refused_by_name() -> None:
    def make(rank: int) -> nn.Module:
        return mlp(rank) if rank == 0 else nn.Sequential(nn.Linear(12, 41), nn.ReLU(), nn.Linear(41, 3))

    with pytest.raises(tw.ProtocolError, match=r"0\.weight.*\(4[01], 12\)"):
        run_cluster(make, steps(2), workers=2, timeout_s=0.5)  # the other one waits in vain


def test_worker_zero_ends_the_training_for_all() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> int:
        while not opt.finished:
            x, y = batch(rank, opt.steps_done)
            if rank == 0 and opt.steps_done == 4:
                opt.stop_after_this_step()
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            opt.step()
        opt.sync()
        return opt.steps_done

    results, _ = run_cluster(mlp, train, workers=3)
    assert results == [5, 5, 5]


def test_a_worker_that_goes_away_ends_it_for_the_others() -> None:
    class Gone(Exception):
        pass

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        steps(2)(rank, model, opt)
        if rank == 1:
            opt._driver._connections[0].close()
            opt._worker.closed = True
            raise Gone
        steps(2)(rank, model, opt)

    with pytest.raises((tw.ThinwireError, Gone)) as caught:
        run_cluster(mlp, train, workers=2)
    if not isinstance(caught.value, Gone):
        assert "worker 1 went away" in str(caught.value)


def test_state_travels_with_the_checkpoint() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        steps(3)(rank, model, opt)
        state = opt.state_dict()
        steps(1)(rank, model, opt)
        moved = opt.state_dict()["contexts"]["0.weight"]["residual"]
        assert not torch.equal(moved, state["contexts"]["0.weight"]["residual"])
        opt.load_state_dict(state)
        back = opt.state_dict()["contexts"]["0.weight"]["residual"]
        assert torch.equal(back, state["contexts"]["0.weight"]["residual"])
        with pytest.raises(tw.ConfigError, match="no residual for"):
            opt.load_state_dict({**state, "contexts": {}})

    run_cluster(mlp, train, workers=1)


# ---- once an epoch


def test_a_design_that_exchanges_once_an_epoch_is_told_how_long_that_is() -> None:
    def clocks(rank: int, model: nn.Module, opt: DistributedOptimizer) -> list[int]:
        found = []
        for step in range(6):
            x, y = batch(rank, step)
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            opt.step()
            found.append(opt.clock)
        return found

    with pytest.raises(tw.ConfigError, match=r"design 'entropy' exchanges once an epoch: pass steps_per_epoch=…"):
        run_cluster(mlp, clocks, design="entropy")
    results, _ = run_cluster(mlp, clocks, design="entropy", steps_per_epoch=3)
    assert results == [[0, 0, 1, 1, 1, 2]] * 2
    for given in ("local[steps=2]", consistency("local[steps=2]")):
        results, _ = run_cluster(mlp, clocks, design="entropy", consistency=given, steps_per_epoch=3)
        assert results == [[0, 1, 1, 2, 2, 3]] * 2, "a consistency of one's own counts for more"


# ---- what is refused


def test_arguments_that_cannot_be() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"codec": "4lc"}, "unknown codec"),
        ({"codec": "auto"}, r"of local updates, as in tw.distribute\(…, design='update\[codec=auto\]'\)"),
        ({"design": "update", "codec": "auto"}, r"design='update' brings its codecs; 'update\[codec=auto\]' has auto"),
        ({"sparsity": 2.0}, "sparsity"),
        ({"design": "update", "s": 1.5}, r"design='update' brings its codecs .*; write design='update\[s=1\.5\]'"),
        ({"design": "3lc", "elastic": True}, "tw.distribute has no elastic, nor has the design: .*elastic"),
        ({"sparsty": 1.0}, "did you mean 'sparsity'"),
        ({"reduce": "max"}, "reduce"),
        ({"rank": -1, "workers": 4}, "rank"),
        ({"server": "http://127.0.0.1:1"}, "grpc://"),
        ({"design": "entropy", "steps_per_epoch": 0}, "steps is 0"),
    ]
    for arguments, message in refused:
        model = mlp(0)
        options = {"server": "grpc://127.0.0.1:1", **arguments}
        with pytest.raises(tw.ConfigError, match=message):
            tw.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    with pytest.raises(tw.ConfigError, match="LBFGS"):
        tw.distribute(model, torch.optim.LBFGS(model.parameters()), server="grpc://127.0.0.1:9")


def test_a_server_that_is_not_there() -> None:
    model = mlp(0)
    with pytest.raises(tw.DeadlineError, match=r"127\.0\.0\.1:9"):
        tw.distribute(
            model, torch.optim.SGD(model.parameters(), lr=0.1), server="grpc://127.0.0.1:9", connect_timeout_s=0.5
        )
