"""The hook with real ranks: equal to plain DDP where nothing is lost, equal on all ranks always.

Every case runs on the same three ranks, one after the other: starting them is what takes time.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.collective.ranks import collectives, step
from tests.hooks.ddp_ranks import batch, ddp, mlp, run_ranks, train, weights
from thinwire.collective.core import Bucket
from thinwire.collective.residuals import TrainedTensor
from thinwire.errors import ProtocolError
from thinwire.policies.compression import ByShape, select

MANY_BUCKETS: dict[str, Any] = {"bucket_cap_mb": 0.002}
VIEWS: dict[str, Any] = {"gradient_as_bucket_view": True, **MANY_BUCKETS}
ZSTD: dict[str, Any] = {"codec": "3lc", "sparsity": 1.5, "entropy": "zstd"}
Weights = dict[str, torch.Tensor]


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def close(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    for name in b:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance, msg=name)


def run(
    rank: int, wrap: dict[str, Any], options: dict[str, Any] | None, steps: int = 6, dtype: torch.dtype = torch.float32
) -> Weights:
    """Trains with DDP, compressed where there are options; returns the weights."""
    model = DistributedDataParallel(mlp(dtype=dtype), **wrap)
    if options is not None:
        ddp.compress(model, **{"measure_link": False, "gather_mb": 0, **options})
    train(model, rank, steps)
    return weights(model.module)


def run_unused(rank: int, wrap: dict[str, Any]) -> tuple[Weights, bool]:
    """A branch that only even steps use; on odd steps its gradient stays None everywhere."""

    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.side, self.head = nn.Linear(16, 300), nn.Linear(16, 300), nn.Linear(300, 4)

        def forward(self, x: torch.Tensor, side: bool) -> torch.Tensor:
            hidden = self.body(x) + (self.side(x) if side else 0)
            return self.head(hidden.relu())  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = DistributedDataParallel(Forked(), find_unused_parameters=True, **wrap)
    state = ddp.compress(model, "3lc", measure_link=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    untouched = True
    for number in range(6):
        x, y = batch(rank, number)
        optimizer.zero_grad()
        before = state.core.residuals.state_dict()["residuals"]["side.weight"]
        nn.functional.cross_entropy(model(x, side=number % 2 == 0), y).backward()  # type: ignore[no-untyped-call]
        if number % 2:
            state.driver.wait_step()
            untouched &= torch.equal(state.core.residuals.state_dict()["residuals"]["side.weight"], before)
            untouched &= bool(before.any())
        optimizer.step()
    return weights(model.module), untouched


def run_accumulating(rank: int, options: dict[str, Any] | None) -> tuple[Weights, int]:
    """Two backward passes a step, of which only the second is exchanged."""
    model = DistributedDataParallel(mlp())
    state = None if options is None else ddp.compress(model, measure_link=False, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(4):
        optimizer.zero_grad()
        with model.no_sync():
            x, y = batch(rank, 2 * number)
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        x, y = batch(rank, 2 * number + 1)
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return weights(model.module), 0 if state is None else state.step


def run_warm_up(rank: int) -> tuple[list[Weights], float]:
    """Five steps of which the first three are uncompressed; returns the weights after each."""
    seen = []
    model = DistributedDataParallel(mlp(), **MANY_BUCKETS)
    state = ddp.compress(model, "3lc", start_step=3, gather_mb=0, measure_link=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(5):
        train(model, rank, 1, first=number, optimizer=optimizer)
        seen.append(weights(model.module))
    return seen, state.counters()["steps"]


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
    tensors = state.core.residuals.tensors.values()
    return {tensor.name: f"{tensor.choice.up.id}/{tensor.choice.down.id}" for tensor in tensors}


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


def run_report(rank: int) -> tuple[str, str, Any]:
    model = DistributedDataParallel(mlp())
    state = ddp.compress(model, "3lc", sparsity=1.75)
    before = str(ddp.report(state))
    train(model, rank, 4)
    report = ddp.report(state)
    state.close()
    return before, str(report), report


def run_sealed(rank: int) -> tuple[Weights, list[str]]:
    """The same training as of "zstd", sealed; and what ranks hear that do not all have the same token."""
    heard = []
    with tempfile.TemporaryDirectory() as folder:
        shared, own = Path(folder, "shared"), Path(folder, "own")
        shared.write_text("the-token-of-all-ranks")
        own.write_text(f"the-token-of-rank-{rank}")
        trained = run(rank, MANY_BUCKETS, {**ZSTD, "credentials": tw.Credentials(token_file=shared)})
        for credentials in (None if rank == 1 else tw.Credentials(token_file=shared), tw.Credentials(token_file=own)):
            try:
                ddp.compress(DistributedDataParallel(mlp()), "3lc", credentials=credentials, measure_link=False)
            except ProtocolError as error:
                heard.append(str(error))
    return trained, heard


def run_gathered(rank: int) -> list[float]:
    """Messages a step where buckets travel together, and where each travels by itself."""
    counted = []
    for gather_mb in (4.0, 0.0):
        model = DistributedDataParallel(mlp(), **MANY_BUCKETS)
        state = ddp.compress(model, "3lc", gather_mb=gather_mb, measure_link=False)
        train(model, rank, 4)
        counted.append(state.counters()["messages"] / 4)
    return counted


def run_alone(rank: int) -> tuple[Weights, Weights]:
    """A group of one rank each."""
    groups = [dist.new_group([only]) for only in range(3)]
    wrap = {"process_group": groups[rank]}
    return run(rank, wrap, {"codec": "3lc"}), run(rank, wrap, None)


def run_uneven(rank: int) -> Weights:
    model = DistributedDataParallel(mlp(), **MANY_BUCKETS)
    ddp.compress(model, "3lc", measure_link=False)
    with model.join():
        train(model, rank, 3 + rank)
    return weights(model.module)


def simulate(_rank: int, steps: int) -> Weights:
    """The same training as of "zstd", in this process: every rank's gradient, both passes played in turn."""
    world, model, codec = 3, mlp(), tw.codec("3lc", sparsity=1.5, entropy="zstd")
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    choices = select(shapes, ByShape(up=codec, down=codec))
    trained = [TrainedTensor(name, p.numel(), p.dtype, choices[name]) for name, p in model.named_parameters()]
    offsets, at = [], 0
    for tensor in trained:
        offsets.append((tensor.name, at))
        at += tensor.numel
    cores, bucket = collectives(trained, world), Bucket(tuple(offsets), 4 * at)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(steps):
        flat = []
        for rank in range(world):
            x, y = batch(rank, number)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            flat.append(np.concatenate([p.grad.reshape(-1).numpy() for p in model.parameters() if p.grad is not None]))
        mean = torch.from_numpy(step(cores, bucket, flat, number)[0])
        for (_, begin), parameter in zip(offsets, model.parameters(), strict=True):
            parameter.grad = mean[begin : begin + parameter.numel()].view_as(parameter).clone()
        optimizer.step()
    return weights(model)


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "plain": (run, ({}, None)),
    "plain, 3 steps": (run, (MANY_BUCKETS, None, 3)),
    "fp32, one bucket": (run, ({}, {"codec": "fp32"})),
    "fp32, many": (run, (MANY_BUCKETS, {"codec": "fp32"})),
    "zstd, simulated": (simulate, (6,)),
    "zstd, one bucket": (run, ({}, ZSTD)),
    "zstd, many": (run, (MANY_BUCKETS, ZSTD)),
    "zstd, views": (run, (VIEWS, ZSTD)),
    "zstd, in one packet": (run, (MANY_BUCKETS, {"gather_mb": 4.0, **ZSTD})),
    "zstd, in three packets or so": (run, (MANY_BUCKETS, {"gather_mb": 0.05, **ZSTD})),
    "3lc": (run, ({}, {"codec": "3lc"})),
    "3lc, static graph": (run, ({"static_graph": True, **MANY_BUCKETS}, {"codec": "3lc"})),
    "unused, one bucket": (run_unused, ({},)),
    "unused, many": (run_unused, (MANY_BUCKETS,)),
    "accumulating, plain": (run_accumulating, (None,)),
    "accumulating, fp32": (run_accumulating, ({"codec": "fp32"},)),
    "accumulating, 3lc": (run_accumulating, ({"codec": "3lc"},)),
    "warm-up": (run_warm_up, ()),
    "scopes": (run_scopes, ()),
    "sum": (run_sum, ()),
    "report": (run_report, ()),
    "sealed": (run_sealed, ()),
    "gathered": (run_gathered, ()),
    "alone": (run_alone, ()),
    "uneven": (run_uneven, ()),
    **{
        f"{dtype}, {codec}": (run, ({}, None if codec == "plain" else {"codec": codec}, 3, dtype))
        for dtype in (torch.float64, torch.bfloat16, torch.float16)
        for codec in ("plain", "fp32", "3lc")
    },
}


def run_all(rank: int) -> dict[str, Any]:
    results = {}
    for name, (work, args) in CASES.items():
        try:
            results[name] = work(rank, *args)
        except Exception as error:
            error.add_note(f"in the case {name!r}")
            raise
    return results


@pytest.fixture(scope="module")
def ranks() -> dict[str, list[Any]]:
    """The results of every case, by rank."""
    by_rank = run_ranks(3, run_all)
    return {name: [results[name] for results in by_rank] for name in CASES}


def test_uncompressed_codec_equals_plain_ddp(ranks: dict[str, list[Any]]) -> None:
    for name in ("fp32, one bucket", "fp32, many"):
        assert all(same(result, ranks[name][0]) for result in ranks[name]), name
        close(ranks[name][0], ranks["plain"][0])
    for ours, plain in ranks["alone"]:
        assert same(ours, plain), "one rank alone loses nothing"


def test_all_ranks_hold_the_same_bits_whatever_the_buckets_threads_and_sockets(ranks: dict[str, list[Any]]) -> None:
    """Residuals belong to slices of parameters: rebuilt, small, large or viewed buckets change nothing at all."""
    expected = ranks["zstd, simulated"][0]
    for name in ("one bucket", "many", "views", "in one packet", "in three packets or so"):
        assert all(same(result, expected) for result in ranks[f"zstd, {name}"]), name
    assert not same(expected, weights(mlp()))
    for sealed, heard in ranks["sealed"]:
        assert same(sealed, expected), "sealing changes no bit"
        assert "rank 1 has credentials = False and rank 0 has True" in heard[0]
        assert "cannot be opened: that rank has another key" in heard[1]
    for name in ("3lc", "3lc, static graph"):
        assert all(same(result, ranks["3lc"][0]) for result in ranks[name]), name
    assert all(same(result, ranks["uneven"][0]) for result in ranks["uneven"]), "uneven inputs under join"


def test_parameters_that_nobody_used_keep_their_residuals(ranks: dict[str, list[Any]]) -> None:
    for name in ("unused, one bucket", "unused, many"):
        for result, untouched in ranks[name]:
            assert same(result, ranks[name][0][0]) and untouched, name


def test_gradient_accumulation_sends_the_sum_once(ranks: dict[str, list[Any]]) -> None:
    plain, (ours, steps) = ranks["accumulating, plain"][0][0], ranks["accumulating, fp32"][0]
    assert steps == 4
    close(ours, plain)
    assert all(same(result, ranks["accumulating, 3lc"][0][0]) for result, _ in ranks["accumulating, 3lc"])


def test_steps_before_start_step_are_plain(ranks: dict[str, list[Any]]) -> None:
    seen, compressed = ranks["warm-up"][0]
    close(seen[2], ranks["plain, 3 steps"][0], 1e-6)
    assert not same(seen[4], seen[2]) and compressed == 2


def test_gradients_of_other_dtypes(ranks: dict[str, list[Any]]) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        plain, ours, coded = (ranks[f"{dtype}, {codec}"] for codec in ("plain", "fp32", "3lc"))
        assert all(value.dtype == dtype for value in ours[0].values())
        close(ours[0], plain[0], tolerance)
        assert all(same(result, coded[0]) for result in coded) and not same(coded[0], plain[0]), dtype


def test_each_parameter_travels_as_asked(ranks: dict[str, list[Any]]) -> None:
    chosen = ranks["scopes"][0]
    assert chosen["0.weight"] == chosen["0.bias"] == "bf16/bf16"
    assert chosen["2.weight"] == "3lc/int8"
    assert chosen["2.bias"] == chosen["3.weight"] == chosen["5.weight"] == "fp32/fp32"
    total = sum(own for own, _ in ranks["sum"])
    for _, reduced in ranks["sum"]:
        torch.testing.assert_close(reduced, total)
        assert torch.equal(reduced, ranks["sum"][0][1])


def test_the_report_counts_what_was_sent(ranks: dict[str, list[Any]]) -> None:
    values = sum(parameter.numel() for parameter in mlp().parameters())
    for before, text, report in ranks["report"]:
        assert "no compressed step" in before
        assert report.steps == 4 and report.link_bps == ranks["report"][0][2].link_bps > 0
        assert report.uncompressed_nbytes == pytest.approx(4 * values * 4 / 3)
        assert 5 < report.ratio < 60
        assert report.sent_nbytes * report.ratio == pytest.approx(report.uncompressed_nbytes)
        assert f"{report.ratio:.1f}× less" in text and "0 skipped, 3lc[sparsity=1.75]; fp32" in text
        assert ("compression pays" if report.pays else "uncompressed would be faster") in text
    for together, apart in ranks["gathered"]:
        # Three ranks: a packet of gradients to each of the others, and one of averages, for each group of buckets.
        assert together == 4 and apart > 8


def test_misuse_is_refused_with_what_to_do() -> None:
    texts = run_ranks(1, run_misuse)[0]
    assert len(texts) == len(MISUSE)
    for text, pattern in zip(texts, MISUSE, strict=True):
        assert re.search(pattern, text), text


MISUSE = (
    "has the hook thinwire_hook already",
    "wrap it first",
    "sparse=False",
    r"it must lie in \[1, 2\)",
    "unknown codec 'four'",
    "allowed are 'mean' and 'sum'",
    "allowed are 'raise' and 'skip'",
    "set nonfinite='skip'",
    "must be 0 or more",
    "must be 0 or more megabytes",
    "match no parameter",
    "is a codec already",
    "between ranks messages are sealed with a token",
)


def run_misuse(rank: int) -> list[str]:
    texts = []
    model = DistributedDataParallel(mlp())
    ddp.compress(model, "3lc", measure_link=False)
    sparse = DistributedDataParallel(nn.Sequential(nn.Embedding(40, 8, sparse=True), nn.Linear(8, 4)))
    fresh = DistributedDataParallel(mlp())
    calls: list[tuple[Any, dict[str, Any]]] = [
        (model, {}),
        (mlp(), {}),
        (sparse, {}),
        (fresh, {"codec": "3lc", "sparsity": 3.0}),
        (fresh, {"codec": "four"}),
        (fresh, {"reduce": "max"}),
        (fresh, {"nonfinite": "ignore"}),
        (fresh, {"scaler": object()}),
        (fresh, {"start_step": -1}),
        (fresh, {"gather_mb": -1}),
        (fresh, {"codecs": {"conv*": "int8"}}),
        (fresh, {"codec": tw.codec("3lc"), "sparsity": 1.5}),
        (fresh, {"credentials": tw.Credentials(ca="ca.pem")}),
    ]
    for given, options in calls:
        try:
            ddp.compress(given, **options)
        except tw.ConfigError as error:
            texts.append(str(error))
    return texts
