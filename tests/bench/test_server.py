"""The server's cost: the load is a real training, and what is computed from its figures."""

from __future__ import annotations

import queue
import threading

import pytest

from thinwire.bench.harness import Stage
from thinwire.bench.server import (
    SETS,
    WARM,
    Cost,
    Counted,
    ServerBench,
    ServerCell,
    ServerLoad,
    ServerShard,
    make_frames,
)
from thinwire.codecs import decode
from thinwire.engines.events import Event
from thinwire.errors import ConfigError
from thinwire.jobs.events import Listening
from thinwire.transports.grpc import GrpcOptions


def test_a_load_of_three_workers() -> None:
    """The server takes every step of it, and reports what each cost and carried."""
    floats = 2 * 3 * 4 * 17_226
    for design in ("fp32", "3lc[s=1.0]", "doublesqueeze-1bit"):
        cost = play(ServerCell(workers=3, design=design, model="mlp", data="digits", steps=WARM + 6))
        assert cost.cpu_seconds_per_step > 0
        if design == "fp32":
            assert cost.bytes_per_step == pytest.approx(floats, rel=0.05)
        else:
            assert cost.bytes_per_step < floats / 8, design


def play(cell: ServerCell) -> Cost:
    reports: queue.Queue[Event] = queue.Queue()
    stage = Stage(report=reports.put, listen="127.0.0.1:0", transport=GrpcOptions())
    shard = threading.Thread(target=ServerShard(steps=cell.steps).play, args=(stage,))
    shard.start()
    listening = reports.get(timeout=60)
    assert isinstance(listening, Listening)
    ServerLoad(server=f"grpc://{listening.address}", cell=cell).play(stage)
    shard.join(60)
    counted = reports.get(timeout=60)
    assert isinstance(counted, Counted)
    return counted.cost


def test_frames_are_the_models_gradients() -> None:
    planned, sets = make_frames("fp32", model="mlp", data="digits", workers=4)
    assert len(sets) == SETS and all(len(frames) == len(planned.tensors) for frames in sets)
    for frame, planned_tensor in zip(sets[0], planned.tensors, strict=True):
        assert decode(frame).shape == planned_tensor.tensor.shape
    assert len({frames[0] for frames in sets}) == SETS, "of other batches"


def test_what_cannot_be_played() -> None:
    for design, model, text in (
        ("terngrad", "mlp", "its workers do more than push frames"),
        ("entropy", "mlp", "its workers do more than push frames"),
        ("fp32", "resnet8", "resnet8 has buffers"),
    ):
        with pytest.raises(ConfigError, match=text):
            make_frames(design, model=model, data="digits", workers=2)
    with pytest.raises(ConfigError, match="more than 5 are needed"):
        ServerBench(steps=WARM)


def test_cost_is_against_the_first_design_and_growth_against_the_fewest_workers() -> None:
    bench = ServerBench(workers=[4, 8], designs=["fp32", "3lc"])
    seconds = dict(zip(bench.cells(), (4.0, 1.0, 6.0, 3.0), strict=True))
    measured = {cell: [Cost(cpu_seconds_per_step=s, bytes_per_step=1)] for cell, s in seconds.items()}
    found = [tuple(bench.compared(cell, measured).values()) for cell in measured]
    assert found == [(1.0, 1.0), (0.25, 1.0), (1.0, 0.75), (0.5, 1.5)]
    [table] = bench.tables(measured)
    assert table.header[-2:] == ["of fp32", "growth / workers"]
    assert table.lines[3] == ["8", "3lc", "3000.0", "3000.0 … 3000.0", "1 B", "0.50", "1.50"]
    last = bench.cells()[-1]
    assert bench.tables({last: measured[last]})[0].lines[0][-2:] == ["–", "–"], "an interrupted bench has no others"
