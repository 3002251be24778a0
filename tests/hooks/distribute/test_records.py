"""Step records and the report of `tw.distribute`: skipped steps, lag, bytes, and which steps count as costs."""

from __future__ import annotations

import re
import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.hooks.cluster import run_cluster
from tests.hooks.exchange.test_records import Kept
from tests.hooks.local_runs import adamw, inner_step, mlp
from tests.hooks.server_runs import one_step, run
from thinwire.hooks import records as module
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.report import Report
from thinwire.reports.step_figures import RecordedSteps
from thinwire.worker.costs import StepCost


class Listener(Kept):
    def skipped(self, table: str = "0.weight") -> list[bool]:
        assert [record.step for record in self.records if record.table == table] == list(range(6))
        return [record.skipped for record in self.records if record.table == table]


def test_records_mark_unchanged_tables_as_skipped() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> None:
        nan = opt._worker.model.tensors[0].parameter
        for step in range(6):
            generator = torch.Generator().manual_seed(1000 * step + rank)
            x = torch.randn(16, 12, generator=generator)
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x), (x[:, :3] + x[:, 3:6]).argmax(1))
            if rank == 1 and step == 2 and skips:
                loss = loss + nan.sum() * float("nan")
            loss.backward()  # type: ignore[no-untyped-call]
            opt.step()
        opt.sync()

    cases: list[tuple[dict[str, Any], list[int]]] = [
        ({"codec": "fp32"}, []),
        ({"codec": "fp32", "consistency": "local[2]"}, [0, 2, 4]),
        ({"codec": "fp32", "consistency": "adaptive[period,threshold=3]"}, [0, 1, 3, 4]),
        ({"codec": tw.codec("3lc", nonfinite="skip")}, [2]),
        ({"design": "entropy", "consistency": "local[4]"}, []),
        ({"design": "mem-sgd-topk"}, []),
    ]
    for options, expected in cases:
        skips = expected == [2]
        listeners = [Listener(), Listener()]
        run(train, metrics=listeners, **options)
        for listener in listeners:
            assert [step for step, skipped in enumerate(listener.skipped()) if skipped] == expected, options
            assert listener.closed == 1


def test_lag_of_many_steps_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAG_WARNING", 2.0)
    listener = Listener()

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> dict[str, float]:
        for step in range(12):
            one_step(model, opt, rank, step)
        opt.sync()
        return opt.residual_ratios()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        [ratios], _ = run(
            train,
            workers=1,
            codec=tw.codec("topk", fraction=0.01),
            codec_down="fp32",
            metrics=[listener],
            min_numel=100,
        )
    lags = [str(warning.message) for warning in caught if "wait in its residual" in str(warning.message)]
    assert len(lags) == 1 and "steps of updates wait" in lags[0]
    assert max(ratios.values()) > 2
    weight = [record for record in listener.records if record.table == "0.weight"]
    assert [record.step for record in weight] == list(range(12))
    assert weight[-1].residual_lag == pytest.approx(ratios["0.weight"])
    assert weight[-1].residual_norm is not None and weight[-1].payload_bytes_push > 0


def test_records_add_up_to_the_traffic() -> None:
    """A pull may apply several updates. The last ones come after the last step, and are in no record."""

    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[dict[str, float], list[StepCost]]:
        for step in range(12):
            if rank == 0:
                time.sleep(0.005)
            one_step(model, opt, rank, step)
        opt.sync()
        return opt.traffic(), [table.cost for tensor in opt._worker.model.tensors for table in tensor.tables]

    for consistency in ("bsp", "ssp[staleness=3,mode=aggressive]", "backup[1]", "local[2]"):
        listeners = [Listener(), Listener()]
        found, _ = run(train, codec="3lc", consistency=consistency, metrics=listeners)
        for (traffic, left), listener in zip(found, listeners, strict=True):
            costs = [*listener.records, *left]
            for way in ("push", "pull"):
                name = f"payload_bytes_{way}"
                assert sum(getattr(each, name) for each in costs) == traffic[name], (consistency, way)
            for phase in ("encode", "decode"):
                seconds = sum(getattr(each, f"{phase}_s") for each in costs)
                assert seconds == pytest.approx(traffic[f"{phase}_seconds"]), (consistency, phase)


def test_pages_show_report_ratio() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> float:
        for step in range(7):
            one_step(model, opt, rank, step)
        opt.sync()
        return opt.report().ratio

    for design in ("3lc[consistency=local[2]]", "local-sgd[h=2]"):
        listener = Listener()
        [ratio], _ = run_cluster(mlp, train, workers=1, metrics=[listener], optimizer=adamw, design=design)
        figures = RecordedSteps(listener.records).figures()
        assert figures.taken == 7 and figures.ratio == pytest.approx(ratio, rel=0.01), design


def test_training_reports_bytes_and_times() -> None:
    def train(rank: int, model: nn.Module, opt: DistributedOptimizer) -> tuple[Report, Report, int]:
        before = opt.report()
        for step in range(9):
            inner_step(model, opt, rank, step)
        return before, opt.report(), sum(parameter.numel() for parameter in model.parameters())

    found, _ = run_cluster(mlp, train, optimizer=adamw, design="local-sgd[h=2]")
    for before, after, values in found:
        assert str(before) == "thinwire: no step yet" and before.compute_share == 0
        assert (after.steps, after.taken, after.void_rounds) == (9, 9, 0)
        assert (after.warm_up, after.compiling) == (5, False), "with the step that takes the second exchange's answer"
        assert after.warm_up_s > 0
        assert re.search(r"\n  left out         the first 5 steps, with [0-9.]+ m?s each of exchanging", str(after))
        assert after.uncompressed_nbytes >= 4 * values
        assert after.sent_nbytes > 0 and after.received_nbytes > 0 and after.ratio > 1
        assert after.compute_s + after.encode_s + after.decode_s + after.wait_s <= after.seconds * (1 + 1e-6)
        assert 0 < after.compute_share < 1 and after.compute_share == pytest.approx(after.compute_s / after.seconds)
