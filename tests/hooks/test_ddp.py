"""The hook with real ranks: equal to plain DDP where nothing is lost, equal on all ranks always."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.hooks.ddp_ranks import batch, ddp, mlp, run_ranks, train, weights

MANY_BUCKETS: dict[str, Any] = {"bucket_cap_mb": 0.002}


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def run(rank: int, wrap: dict[str, Any], options: dict[str, Any] | None, steps: int = 6) -> dict[str, torch.Tensor]:
    """Trains with DDP, compressed where there are options; returns the weights."""
    model = DistributedDataParallel(mlp(), **wrap)
    if options is not None:
        ddp.compress(model, **{"measure_link": False, "gather_mb": 0, **options})
    train(model, rank, steps)
    return weights(model.module)


@pytest.mark.parametrize("wrap", [{}, MANY_BUCKETS], ids=["one bucket", "many"])
def test_uncompressed_codec_equals_plain_ddp(wrap: dict[str, Any]) -> None:
    plain = run_ranks(3, run, wrap, None)
    ours = run_ranks(3, run, wrap, {"codec": "fp32"})
    for result in ours:
        for name in plain[0]:
            torch.testing.assert_close(result[name], plain[0][name], rtol=1e-5, atol=1e-6)
    assert same(ours[0], ours[1]) and same(ours[1], ours[2])


@pytest.mark.parametrize("codec", [{"codec": "3lc", "sparsity": 1.75}, {"codec": "3lc", "entropy": "zstd"}])
def test_all_ranks_hold_the_same_bits_whatever_the_buckets(codec: dict[str, Any]) -> None:
    """Residuals belong to slices of parameters: rebuilt, small, large or viewed buckets change nothing at all."""
    wraps: list[dict[str, Any]] = [{}, MANY_BUCKETS, {"gradient_as_bucket_view": True, **MANY_BUCKETS}]
    results = [result for wrap in wraps for result in run_ranks(3, run, wrap, codec)]
    # The model's 113 kB in one message to every rank, or in three or so.
    for gather_mb in (4.0, 0.05):
        results += run_ranks(3, run, MANY_BUCKETS, {"gather_mb": gather_mb, **codec})
    assert all(same(result, results[0]) for result in results)
    assert not same(results[0], weights(mlp()))


def simulate(rank: int, steps: int) -> dict[str, torch.Tensor]:
    """The same training in one process: every rank's gradient, both passes by hand (rank is not used)."""
    from tests.hooks.test_ddp_exchange import exchange
    from thinwire.hooks.ddp.exchange import shares
    from thinwire.hooks.ddp.residuals import Residuals, Trained
    from thinwire.policies.compression import ByShape
    from thinwire.policies.selection import select

    world, model = 3, mlp()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    codec = tw.codec("3lc", sparsity=1.5)
    choices = select(shapes, ByShape(up=codec, down=codec))
    trained = [Trained(name, p.numel(), p.dtype, choices[name]) for name, p in model.named_parameters()]
    offsets, at = [], 0
    for one in trained:
        offsets.append((one.name, at))
        at += one.numel
    all_shares = [
        shares(Residuals(trained, r, world, mean=True, seed=0), offsets, drop_zeros=False) for r in range(world)
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        flat = []
        for r in range(world):
            x, y = batch(r, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            flat.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).numpy())
        mean = torch.from_numpy(exchange(all_shares, flat)[0])
        for (_, begin), parameter in zip(offsets, model.parameters(), strict=True):
            parameter.grad = mean[begin : begin + parameter.numel()].view_as(parameter).clone()
        optimizer.step()
    return weights(model)


def test_threads_and_sockets_change_nothing_about_the_arithmetic() -> None:
    expected = run_ranks(1, simulate, 5)[0]
    for result in run_ranks(3, run, MANY_BUCKETS, {"codec": "3lc", "sparsity": 1.5}, 5):
        assert same(result, expected)


def run_unused(rank: int, wrap: dict[str, Any]) -> tuple[dict[str, torch.Tensor], bool]:
    """A branch that only even steps use; on odd steps its gradient stays None everywhere."""

    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.side, self.head = nn.Linear(16, 300), nn.Linear(16, 300), nn.Linear(300, 4)

        def forward(self, x: torch.Tensor, side: bool) -> torch.Tensor:
            hidden = self.body(x) + (self.side(x) if side else 0)
            return self.head(hidden.relu())  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = DistributedDataParallel(Forked(), **wrap)
    state = ddp.compress(model, "3lc", measure_link=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    untouched = True
    for step in range(6):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        before = state.residuals.state_dict()["residuals"]["side.weight"]
        nn.functional.cross_entropy(model(x, side=step % 2 == 0), y).backward()  # type: ignore[no-untyped-call]
        if step % 2:
            state.pipeline.wait_step()
            untouched &= torch.equal(state.residuals.state_dict()["residuals"]["side.weight"], before)
            untouched &= bool(before.any())
        optimizer.step()
    return weights(model.module), untouched


@pytest.mark.parametrize("wrap", [{}, MANY_BUCKETS], ids=["one bucket", "many"])
def test_parameters_that_nobody_used_keep_their_residuals(wrap: dict[str, Any]) -> None:
    results = run_ranks(2, run_unused, {"find_unused_parameters": True, **wrap})
    assert same(results[0][0], results[1][0])
    assert results[0][1] and results[1][1]


def test_static_graph() -> None:
    results = run_ranks(2, run, {"static_graph": True, **MANY_BUCKETS}, {"codec": "3lc"})
    assert same(results[0], results[1])
    assert same(results[0], run_ranks(2, run, {}, {"codec": "3lc"})[0])


def run_accumulating(rank: int, options: dict[str, Any] | None) -> tuple[dict[str, torch.Tensor], int]:
    model = DistributedDataParallel(mlp())
    state = None if options is None else ddp.compress(model, measure_link=False, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4):
        optimizer.zero_grad()
        with model.no_sync():
            x, y = batch(rank, 2 * step)
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        x, y = batch(rank, 2 * step + 1)
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return weights(model.module), 0 if state is None else state.step


def test_gradient_accumulation_sends_the_sum_once() -> None:
    plain = run_ranks(2, run_accumulating, None)[0][0]
    ours, steps = run_ranks(2, run_accumulating, {"codec": "fp32"})[0]
    assert steps == 4
    for name in plain:
        torch.testing.assert_close(ours[name], plain[name], rtol=1e-5, atol=1e-6)
    compressed = run_ranks(2, run_accumulating, {"codec": "3lc"})
    assert same(compressed[0][0], compressed[1][0])


def run_warm_up(rank: int) -> tuple[list[dict[str, torch.Tensor]], float]:
    seen = []
    model = DistributedDataParallel(mlp(), **MANY_BUCKETS)
    state = ddp.compress(model, "3lc", start_step=3, gather_mb=0, measure_link=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(5):
        train(model, rank, 1, first=step, optimizer=optimizer)
        seen.append(weights(model.module))
    return seen, state.counters()["steps"]


def test_steps_before_start_step_are_plain() -> None:
    seen, compressed = run_ranks(2, run_warm_up)[0]
    assert same(seen[2], run_ranks(2, run, MANY_BUCKETS, None, 3)[0])
    assert not same(seen[4], run_ranks(2, run, MANY_BUCKETS, None, 5)[0])
    assert compressed == 2


def run_dtype(rank: int, dtype: torch.dtype, codec: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    results = []
    for compressed in (True, False):
        model = DistributedDataParallel(mlp(dtype=dtype))
        if compressed:
            ddp.compress(model, codec, measure_link=False)
        train(model, rank, 3)
        results.append(weights(model.module))
    return results[0], results[1]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)], ids=str
)
def test_gradients_of_other_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    for ours, plain in run_ranks(2, run_dtype, dtype, "fp32"):
        assert all(value.dtype == dtype for value in ours.values())
        for name in plain:
            torch.testing.assert_close(ours[name], plain[name], rtol=tolerance, atol=tolerance)
    first, second = run_ranks(2, run_dtype, dtype, "3lc")
    assert same(first[0], second[0])
    assert not same(first[0], first[1])


def run_scopes(rank: int) -> dict[str, str]:
    model = DistributedDataParallel(mlp())
    state = ddp.compress(
        model,
        "3lc",
        codec_down="int8",
        codecs={"0.*": "bf16"},
        last_layer="fp32",
        exclude=lambda name, shape: name == "3.weight",
        measure_link=False,
    )
    train(model, rank, 2)
    return {name: f"{one.choice.up.id}/{one.choice.down.id}" for name, one in state.residuals.trained.items()}


def test_each_parameter_travels_as_asked() -> None:
    chosen = run_ranks(2, run_scopes)[0]
    assert chosen["0.weight"] == chosen["0.bias"] == "bf16/bf16"
    assert chosen["2.weight"] == "3lc/int8"
    assert chosen["2.bias"] == chosen["3.weight"] == "fp32/fp32"
    assert chosen["5.weight"] == "fp32/fp32"


def run_sum(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(rank, 0)
    own = mlp()
    nn.functional.cross_entropy(own(x), y).backward()  # type: ignore[no-untyped-call]
    model = DistributedDataParallel(mlp())
    ddp.compress(model, "fp32", reduce="sum", measure_link=False)
    nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    alone, reduced = next(own.parameters()).grad, next(model.parameters()).grad
    assert alone is not None and reduced is not None
    return alone, reduced


def test_the_sum_is_an_option() -> None:
    (a, total), (b, again) = run_ranks(2, run_sum)
    torch.testing.assert_close(total, a + b)
    assert torch.equal(total, again)


def run_report(rank: int) -> tuple[str, Any]:
    model = DistributedDataParallel(mlp())
    state = ddp.compress(model, "3lc", sparsity=1.75)
    before = str(ddp.report(state))
    train(model, rank, 4)
    report = ddp.report(state)
    assert "no compressed step" in before
    return str(report), report


def test_the_report_counts_what_was_sent() -> None:
    text, report = run_ranks(2, run_report)[0]
    values = sum(parameter.numel() for parameter in mlp().parameters())
    assert report.steps == 4 and report.link_bps > 0
    assert report.uncompressed_nbytes == 4 * values
    assert 5 < report.ratio < 60
    assert report.sent_nbytes * report.ratio == pytest.approx(report.uncompressed_nbytes)
    assert f"{report.ratio:.1f}× less" in text and "0 skipped, 3lc[sparsity=1.75]; fp32" in text
    assert ("compression pays" if report.pays else "uncompressed would be faster") in text


def run_gathered(rank: int, gather_mb: float) -> float:
    model = DistributedDataParallel(mlp(), **MANY_BUCKETS)
    state = ddp.compress(model, "3lc", gather_mb=gather_mb, measure_link=False)
    train(model, rank, 4)
    return state.counters()["messages"] / 4


def test_small_buckets_travel_together() -> None:
    # Two ranks: one message of gradients to the other, one of averages, for each job.
    assert run_ranks(2, run_gathered, 4.0) == [2.0, 2.0]
    assert min(run_ranks(2, run_gathered, 0.0)) > 4


def run_alone(rank: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return run(rank, {}, {"codec": "3lc"}), run(rank, {}, None)


def test_one_rank_alone_loses_nothing() -> None:
    ours, plain = run_ranks(1, run_alone)[0]
    assert same(ours, plain)


def run_uneven(rank: int) -> dict[str, torch.Tensor]:
    model = DistributedDataParallel(mlp(), **MANY_BUCKETS)
    ddp.compress(model, "3lc", measure_link=False)
    with model.join():
        train(model, rank, 3 + rank)
    return weights(model.module)


def test_uneven_inputs_under_join() -> None:
    results = run_ranks(2, run_uneven)
    assert same(results[0], results[1])
