"""The server's cost: the load is a real training, and what is computed from its figures."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from thinwire.bench.server import SETS, WARM, make_frames, run_load, serve_measured, verdicts
from thinwire.codecs import decode
from thinwire.errors import ConfigError


@pytest.mark.parametrize("design", ["fp32", "3lc[s=1.0]", "doublesqueeze-1bit"])
def test_a_load_of_three_workers(design: str) -> None:
    """The server takes every step of it, and says what each cost and carried."""
    steps = WARM + 6
    reports: queue.Queue[dict[str, Any]] = queue.Queue()
    shard = threading.Thread(target=serve_measured, args=(steps, "127.0.0.1:0", reports.put))
    shard.start()
    address = reports.get(timeout=60)["address"]
    run_load(
        f"grpc://{address}",
        design=design,
        workers=3,
        model="mlp",
        data="digits",
        steps=steps,
        report=reports.put,
    )
    shard.join(60)
    found = {report["event"]: report for report in (reports.get(timeout=60), reports.get(timeout=60))}
    assert found["done"] == {"event": "done", "rank": 0}
    served = found["served"]
    assert served["cpu_seconds_per_step"] > 0
    floats = 2 * 3 * 4 * 17_226
    if design == "fp32":
        assert served["bytes_per_step"] == pytest.approx(floats, rel=0.05)
    else:
        assert served["bytes_per_step"] < floats / 8


def test_frames_are_the_models_gradients() -> None:
    planned, sets = make_frames("fp32", model="mlp", data="digits", workers=4)
    assert len(sets) == SETS and all(len(frames) == len(planned.tensors) for frames in sets)
    for frame, planned_tensor in zip(sets[0], planned.tensors, strict=True):
        assert decode(frame).shape == planned_tensor.tensor.shape
    assert len({frames[0] for frames in sets}) == SETS, "of other batches"


@pytest.mark.parametrize(
    ("design", "model", "text"),
    [
        ("terngrad", "mlp", "its workers do more than push frames"),
        ("entropy", "mlp", "its workers do more than push frames"),
        ("fp32", "resnet8", "resnet8 has buffers"),
    ],
)
def test_what_cannot_be_played(design: str, model: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_frames(design, model=model, data="digits", workers=2)


def test_cost_is_against_the_base_and_growth_against_the_fewest_workers() -> None:
    seconds = {("fp32", 4): 4.0, ("fp32", 8): 6.0, ("3lc", 4): 1.0, ("3lc", 8): 3.0}
    rows = [{"design": d, "workers": n, "cpu_seconds_per_step": s} for (d, n), s in seconds.items()]
    found = {(each["design"], each["workers"]): (each["cost"], each["growth"]) for each in verdicts(rows, "fp32")}
    assert found == {
        ("fp32", 4): (1.0, 1.0),
        ("fp32", 8): (1.0, 0.75),
        ("3lc", 4): (0.25, 1.0),
        ("3lc", 8): (0.5, 1.5),
    }
