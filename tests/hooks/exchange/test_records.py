"""Step records of the hooks: the bytes that were sent, residuals and lag, and a training that does not notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.hooks import fsdp_ranks
from tests.hooks.ddp_ranks import mlp, run_ranks, train, weights
from tests.hooks.test_named import SHAPES, tensors
from thinwire.errors import ConfigError
from thinwire.hooks import ddp, fsdp, named
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


def recorded(rank: int) -> tuple[list[StepRecord], float, int, bool]:
    """Nine steps, of which the first two are uncompressed; every second one is measured."""
    found = []
    for measured in (False, True):
        model = DistributedDataParallel(mlp())
        state = ddp.compress(model, codec="3lc", start_step=2, measure_link=False)
        kept = Kept()
        if measured:
            state.record_to(kept, every=2)
        train(model, rank, 9)
        state.record_scores(loss=0.5)
        payload = state.counters()["payload_bytes"]
        state.close()
        found.append(weights(model))
    same = all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    return kept.records, payload, kept.closed, same


def all_steps(rank: int) -> tuple[list[StepRecord], float]:
    """Four compressed steps, all measured."""
    model = DistributedDataParallel(mlp())
    state = ddp.compress(model, codec="int8", measure_link=False)
    kept = Kept()
    state.record_to(kept, every=1)
    train(model, rank, 4)
    payload = state.counters()["payload_bytes"]
    state.close()
    return kept.records, payload


def test_what_is_recorded_is_what_was_sent() -> None:
    ranks = run_ranks(2, all_steps)
    (own, sent), (others, _) = ranks
    pushed = sum(record.payload_bytes_push for record in of_tables(own))
    averages = sum(record.payload_bytes_pull for record in of_tables(others))  # what rank 0 sent, rank 1 received
    assert pushed + averages == sent
    coded = [each for each in of_tables(own) if each.codec == "int8" and each.numel >= 1024]
    assert coded
    for each in coded:  # as with every number of ranks, of what crosses a link
        travelled = each.payload_bytes_push + each.payload_bytes_pull
        assert each.ways * each.plain_way_nbytes == pytest.approx(4 * travelled, rel=0.01), each
    assert {record.step for record in own} == {0, 1, 2, 3}
    names = {name for name, _ in mlp().named_parameters()}
    assert {record.table for record in of_tables(own)} == names
    figures = RecordedSteps([*own, *others]).figures(leave_out=0)
    assert figures.ranks == 2 and 3 < figures.ratio < 9  # int8, and each rank keeps half of the model to itself
    assert figures.encode_s > 0 and figures.decode_s > 0


def test_a_training_does_not_notice_and_steps_between_are_left_out() -> None:
    records, _, closed, same = run_ranks(2, recorded)[0]
    assert same and closed == 1
    assert sorted({record.step for record in of_tables(records)}) == [0, 2, 4, 6, 8]
    large = [record for record in records if record.table == "2.weight"]
    uncompressed, *compressed = large
    assert uncompressed.codec == "uncompressed"
    assert uncompressed.payload_bytes_push == uncompressed.payload_bytes_pull == 200 * 120 * 4 // 2
    assert uncompressed.plain_way_nbytes == uncompressed.payload_bytes_push
    assert {record.codec for record in compressed} == {"3lc"}
    assert all(record.bits_per_value_push < 3 for record in compressed)
    assert large[0].residual_norm == 0.0
    lags = [record.residual_lag for record in compressed]
    assert all(lag is not None and 0.3 < lag < 20 for lag in lags)
    small = [record for record in records if record.table == "3.weight"]
    assert all(record.residual_norm is None and record.residual_lag is None for record in small)
    assert [record.loss for record in records if record.loss is not None] == [0.5]


def skipping(rank: int) -> list[bool]:
    model = DistributedDataParallel(mlp())
    state = ddp.compress(model, codec="3lc", nonfinite="skip", measure_link=False)
    kept = Kept()
    state.record_to(kept, every=1)
    for step in range(3):
        x = torch.full((8, 16), torch.nan if step == 1 and rank == 1 else 1.0)
        model(x).sum().backward()
        model.zero_grad()
    state.close()
    return [record.skipped for record in kept.records if record.table == "0.weight"]


def test_a_step_that_is_skipped_is_said_to_be() -> None:
    assert run_ranks(2, skipping)[0] == [False, True, False]


def of_shards(rank: int) -> dict[str, list[StepRecord]]:
    found = {}
    for kind in ("hsdp", "whole"):
        model = fsdp_ranks.sharded(kind)
        state = fsdp.compress(model, codec="3lc", measure_link=False)
        kept = Kept()
        state.record_to(kept, every=1)
        fsdp_ranks.train(model, rank, 3)
        state.close()
        found[kind] = of_tables(kept.records)
    return found


def test_shards_are_recorded_too() -> None:
    found = run_ranks(4, of_shards)[0]
    for kind, ways in (("hsdp", 2), ("whole", 1)):
        large = [record for record in found[kind] if record.table == "2.weight"]
        assert [record.step for record in large] == [0, 1, 2]
        assert all(record.ways == ways and record.payload_bytes_push > 0 for record in large)
        assert all((record.payload_bytes_pull > 0) == (ways == 2) for record in large)


def with_an_empty_one(rank: int) -> list[tuple[str, int]]:
    given = {"w": torch.ones(64, 32), "none": torch.zeros(0)}
    state = named.compress(given, codec="3lc", min_numel=1, measure_link=False)
    kept = Kept()
    state.record_to(kept, every=1)
    state.average(given)
    state.close()
    return [(record.table, record.plain_way_nbytes) for record in of_tables(kept.records)]


def test_a_tensor_without_values_is_recorded_too() -> None:
    ranks = run_ranks(2, with_an_empty_one)
    assert sum(dict(each)["w"] for each in ranks) == 64 * 32 * 4 and all(("none", 0) in each for each in ranks)


def resumed(rank: int) -> dict[str, list[int]]:
    """Steps that are recorded where writers are given before a state is loaded, and the state then once more."""
    found = {}
    for kind in ("by name", "DDP"):
        given, model = {"w": torch.ones(64, 32)}, DistributedDataParallel(mlp())
        by_name = kind == "by name"
        state: Any = named.compress(given, measure_link=False) if by_name else ddp.compress(model, measure_link=False)
        saved, kept = {**state.state_dict(), "step": 3}, Kept()
        state.record_to(kept, every=2)
        for steps in (2, 1):
            state.load_state_dict(saved)
            for _ in range(steps):
                state.average(given) if by_name else train(model, rank, 1)
        state.close()
        found[kind] = [record.step for record in kept.records if not record.table]
    return found


def test_a_state_that_is_loaded_leaves_no_record_of_a_step_that_nobody_took() -> None:
    for found in run_ranks(2, resumed):
        assert found == {"by name": [4], "DDP": [4]}


def by_name(rank: int) -> tuple[list[StepRecord], list[str]]:
    state = named.compress(tensors(rank, 0), codec="3lc", min_numel=1, measure_link=False)
    kept = Kept()
    state.record_to(kept, every=2)
    for step in range(3):
        state.average(tensors(rank, step))
    calls = (lambda: state.record_to(kept), lambda: fresh(rank).record_to(kept, every=0))
    errors = [refusal(call) for call in calls]
    state.close()
    return of_tables(kept.records), errors


def fresh(rank: int) -> Any:
    return named.compress(tensors(rank, 0), codec="3lc", measure_link=False)


def refusal(call: Callable[[], None]) -> str:
    with pytest.raises(ConfigError) as refused:
        call()
    return str(refused.value)


def test_tensors_by_name_are_recorded_and_wrong_calls_are_refused() -> None:
    records, errors = run_ranks(3, by_name)[0]
    assert {(record.step, record.table) for record in records} == {(step, name) for step in (0, 2) for name in SHAPES}
    assert errors[0].startswith("records go to metrics writers already")
    assert errors[1].startswith("every=0")
