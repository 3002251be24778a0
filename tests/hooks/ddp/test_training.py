"""The DDP hook on three ranks: buckets, packets and sealing change no bit; uneven inputs; compiled models; reports."""

from __future__ import annotations

import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.hooks.ddp_ranks import (
    Weights,
    ddp,
    mlp,
    refusal,
    run_cases,
    same,
    train,
    weights,
)

MANY_BUCKETS: dict[str, Any] = {"bucket_cap_mb": 0.002}
VIEWS: dict[str, Any] = {"gradient_as_bucket_view": True, **MANY_BUCKETS}
ZSTD: dict[str, Any] = {"codec": "3lc", "sparsity": 1.5, "entropy": "zstd"}
CODEC: dict[str, Any] = {"codec": "3lc", "sparsity": 1.5, "measure_link": False}
Ranks = dict[str, list[Any]]


def run(rank: int, wrap: dict[str, Any], options: dict[str, Any]) -> Weights:
    """Trains with DDP, compressed; returns the weights."""
    model = DistributedDataParallel(mlp(), **wrap)
    ddp.compress(model, **{"measure_link": False, "gather_mb": 0, **options})
    train(model, rank, 6)
    return weights(model.module)


def run_report(rank: int) -> tuple[str, Any, float]:
    model = DistributedDataParallel(mlp(), **MANY_BUCKETS)
    state = ddp.compress(model, "3lc", sparsity=1.75)
    before = str(ddp.report(state))
    train(model, rank, 4)
    return before, ddp.report(state), state.counters()["messages"] / 4


def run_sealed(rank: int) -> tuple[Weights, list[str]]:
    """Trains as "zstd, many" does, with a token; returns the errors of ranks without a token or with another."""
    with tempfile.TemporaryDirectory() as folder:
        shared, own = Path(folder, "shared"), Path(folder, "own")
        shared.write_text("the-token-of-all-ranks")
        own.write_text(f"the-token-of-rank-{rank}")
        trained = run(rank, MANY_BUCKETS, {**ZSTD, "credentials": tw.Credentials(token_file=shared)})
        heard = [
            refusal(partial(ddp.compress, DistributedDataParallel(mlp()), credentials=given))
            for given in (None if rank == 1 else tw.Credentials(token_file=shared), tw.Credentials(token_file=own))
        ]
    return trained, heard


def run_joined(rank: int) -> list[tuple[Weights, int, list[str]]]:
    """Two epochs with more batches on some ranks; returns their warnings, too."""
    found = []
    for options in (MANY_BUCKETS, VIEWS, {"static_graph": True}):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            model = DistributedDataParallel(mlp(), **options)
            state = ddp.compress(model, **CODEC)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for _ in range(2):
                with model.join():
                    train(model, rank, 3 + rank, optimizer=optimizer)
            state.close()
        told = [str(each.message) for each in heard if issubclass(each.category, UserWarning)]
        found.append((weights(model.module), state.step, told))
    return found


def run_compiled(rank: int) -> dict[str, tuple[list[torch.Tensor], list[str]]]:
    """Plain DDP, compiled DDP, and DDP of a compiled model, which resumes from the residuals of the first."""
    results, saved = {}, dict[str, Any]()
    for how in ("plain", "outside", "inside"):
        inner: Any = torch.compile(mlp(), backend="eager") if how == "inside" else mlp()
        wrapped = DistributedDataParallel(inner)
        model: Any = torch.compile(wrapped, backend="eager") if how == "outside" else wrapped
        state = ddp.compress(model, **CODEC)
        train(model, rank, 3)
        saved = saved or state.state_dict()
        state.load_state_dict(saved)
        names = list(state.core.residuals.tensors)
        results[how] = ([value for _, value in sorted(weights(wrapped.module).items())], names)
    return results


CASES: dict[str, tuple[Any, ...]] = {
    "zstd, one bucket": (run, {}, ZSTD),
    "zstd, many": (run, MANY_BUCKETS, ZSTD),
    "zstd, views": (run, VIEWS, ZSTD),
    "zstd, in one packet": (run, MANY_BUCKETS, {"gather_mb": 4.0, **ZSTD}),
    "report": (run_report,),
    "sealed": (run_sealed,),
    "joined": (run_joined,),
    "compiled": (run_compiled,),
}


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    return run_cases(3, CASES)


def test_buckets_packets_and_sealing_change_no_bit(ranks: Ranks) -> None:
    """Residuals belong to slices of parameters, not to buckets; sums are taken in rank order."""
    expected = ranks["zstd, one bucket"][0]
    for name in ("one bucket", "many", "views", "in one packet"):
        assert all(same(result, expected) for result in ranks[f"zstd, {name}"]), name
    assert not same(expected, weights(mlp()))
    for sealed, heard in ranks["sealed"]:
        assert same(sealed, expected)
        assert heard[0].startswith("ProtocolError: rank 1 has credentials = False")
        assert heard[1].startswith("ProtocolError") and "another key" in heard[1]


def test_join_with_uneven_inputs_keeps_replicas_equal(ranks: Ranks) -> None:
    for found in ranks["joined"]:
        for (trained, steps, told), (first, *_) in zip(found, ranks["joined"][0], strict=True):
            assert (steps, told) == (10, []) and same(trained, first)


def test_compiled_models_keep_names_residuals_and_equal_replicas(ranks: Ranks) -> None:
    for results in ranks["compiled"]:
        for how, (trained, names) in results.items():
            assert names == [name for name, _ in mlp().named_parameters()], how
            for ours, plain, first in zip(trained, results["plain"][0], ranks["compiled"][0][how][0], strict=True):
                torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
                assert torch.equal(ours, first), how


def test_report_counts_bytes_of_grouped_buckets(ranks: Ranks) -> None:
    values = sum(parameter.numel() for parameter in mlp().parameters())
    for before, report, messages in ranks["report"]:
        assert before == "thinwire: no step yet"
        assert messages == 4, "buckets travel together: for two peers a packet of gradients and one of averages each"
        assert report.steps == report.taken == 4 and report.link_bps == ranks["report"][0][1].link_bps > 0
        assert report.uncompressed_nbytes == pytest.approx(4 * values * 4 / 3)
        assert 5 < report.ratio < 60
        assert report.sent_nbytes * report.ratio == pytest.approx(report.uncompressed_nbytes)
        assert f"{report.ratio:.1f}× less" in str(report) and "0 skipped, 3lc[sparsity=1.75]; fp32" in str(report)
        assert ("compression pays" if report.pays else "uncompressed would be faster") in str(report)
