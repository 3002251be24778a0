"""Step records of the DDP, FSDP2 and named hooks on two ranks: bytes, residuals and lag of every measured step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.hooks.ddp_ranks import backward, mlp, run_cases, same, train, weights
from thinwire.hooks import ddp, fsdp
from thinwire.reports.step_figures import RecordedSteps
from thinwire.telemetry import StepRecord


class Kept:
    """A metrics writer that keeps records."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.closed = 0

    def record(self, record: StepRecord) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.closed += 1


def of_tables(records: list[StepRecord]) -> list[StepRecord]:
    return [record for record in records if record.table]


def compressed(codec: str, every: int, **options: Any) -> tuple[DistributedDataParallel, ddp.ThinwireState, Kept]:
    model, kept = DistributedDataParallel(mlp()), Kept()
    state = ddp.compress(model, codec=codec, measure_link=False, **options)
    if every:
        state.record_to(kept, every=every)
    return model, state, kept


def run_some_steps(rank: int) -> tuple[list[StepRecord], int, bool]:
    """Nine steps, of which the first two are uncompressed; without records, and with one for every second step."""
    found = []
    for every in (0, 2):
        model, state, kept = compressed("3lc", every, start_step=2)
        train(model, rank, 9)
        state.record_scores(loss=0.5)
        state.close()
        found.append(weights(model))
    return kept.records, kept.closed, same(*found)


def run_all_steps(rank: int) -> tuple[list[StepRecord], float]:
    """Four compressed steps, all measured."""
    model, state, kept = compressed("int8", 1)
    train(model, rank, 4)
    payload = state.counters()["payload_bytes"]
    state.close()
    return kept.records, payload


def run_ratio(rank: int, kind: str) -> tuple[list[StepRecord], float, int]:
    """Seven steps, the first three uncompressed, of which one in four is recorded."""
    state: ddp.ThinwireState | fsdp.ShardedState
    if kind == "ddp":
        model, state, kept = compressed("3lc", 4, start_step=3)
        train(model, rank, 7)
    else:
        sharded, kept = mlp(), Kept()
        fully_shard(sharded)
        state = fsdp.compress(sharded, codec="3lc", gather="int8", measure_link=False)
        state.record_to(kept, every=4)
        train(sharded, rank, 7)
    state.close()
    report = ddp.report(state)
    return kept.records, report.ratio, report.taken


def run_skipping(rank: int) -> list[bool]:
    model, state, kept = compressed("3lc", 1, nonfinite="skip")
    for step in range(3):
        backward(model, rank, step, torch.nan if step == 1 and rank == 1 else 1.0)
        model.zero_grad()
    state.close()
    return [record.skipped for record in kept.records if record.table == "0.weight"]


def run_shards(rank: int, *shape: int) -> list[StepRecord]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model, kept = mlp(), Kept()
    fully_shard(model, mesh=mesh)
    state = fsdp.compress(model, codec="3lc", measure_link=False)
    state.record_to(kept, every=1)
    train(model, rank, 3)
    state.close()
    return of_tables(kept.records)


@pytest.fixture(scope="module")
def ranks() -> dict[str, list[Any]]:
    cases: dict[str, tuple[Any, ...]] = {
        "some steps": (run_some_steps,),
        "all steps": (run_all_steps,),
        "skipping": (run_skipping,),
        "ratio ddp": (run_ratio, "ddp"),
        "ratio fsdp": (run_ratio, "fsdp"),
        "replicas": (run_shards, 2, 1),
        "shards": (run_shards, 2),
    }
    return run_cases(2, cases)


def test_recorded_bytes_are_the_bytes_sent(ranks: dict[str, list[Any]]) -> None:
    (own, sent), (others, _) = ranks["all steps"]
    pushed = sum(record.payload_bytes_push for record in of_tables(own))
    averages = sum(record.payload_bytes_pull for record in of_tables(others))  # what rank 0 sent, rank 1 received
    assert pushed + averages == sent
    coded = [each for each in of_tables(own) if each.codec == "int8" and each.numel >= 1024]
    assert coded
    for each in coded:  # of what crosses a link
        travelled = each.payload_bytes_push + each.payload_bytes_pull
        assert each.ways * each.plain_way_nbytes == pytest.approx(4 * travelled, rel=0.01), each
    assert {record.step for record in own} == {0, 1, 2, 3}
    assert {record.table for record in of_tables(own)} == {name for name, _ in mlp().named_parameters()}


def test_records_change_no_bit_and_cover_measured_steps_only(ranks: dict[str, list[Any]]) -> None:
    records, closed, unchanged = ranks["some steps"][0]
    assert unchanged and closed == 1
    assert sorted({record.step for record in of_tables(records)}) == [0, 2, 4, 6, 8]
    uncompressed, *coded = [record for record in records if record.table == "2.weight"]
    assert uncompressed.codec == "uncompressed" and uncompressed.residual_norm == 0.0
    assert uncompressed.payload_bytes_push == uncompressed.payload_bytes_pull == 200 * 120 * 4 // 2
    assert uncompressed.plain_way_nbytes == uncompressed.payload_bytes_push
    assert {record.codec for record in coded} == {"3lc"} and all(each.bits_per_value_push < 3 for each in coded)
    assert all(each.residual_lag is not None and 0.3 < each.residual_lag < 20 for each in coded)
    small = [record for record in records if record.table == "3.weight"]
    assert all(record.residual_norm is None and record.residual_lag is None for record in small)
    assert [record.loss for record in records if record.loss is not None] == [0.5]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_pages_show_report_ratio_with_few_recorded_steps(ranks: dict[str, list[Any]], kind: str) -> None:
    records, ratio, taken = ranks[f"ratio {kind}"][0]
    figures = RecordedSteps(records).figures()
    assert taken == figures.taken == 7 and {each.step for each in of_tables(records)} == {0, 4}
    assert figures.ratio == pytest.approx(ratio, rel=1e-9) and ratio > 1
    both = RecordedSteps(record for own, _, _ in ranks[f"ratio {kind}"] for record in own).figures()
    ratios = [own for _, own, _ in ranks[f"ratio {kind}"]]
    assert both.taken == 7 and min(ratios) <= both.ratio <= max(ratios)


def test_skipped_steps_are_recorded_as_skipped(ranks: dict[str, list[Any]]) -> None:
    assert ranks["skipping"] == [[False, True, False]] * 2


def test_shards_of_fsdp2_are_recorded(ranks: dict[str, list[Any]]) -> None:
    for kind, ways in (("replicas", 2), ("shards", 1)):
        large = [record for record in ranks[kind][0] if record.table == "2.weight"]
        assert [record.step for record in large] == [0, 1, 2]
        assert all(record.ways == ways and record.payload_bytes_push > 0 for record in large)
        assert all((record.payload_bytes_pull > 0) == (ways == 2) for record in large)
