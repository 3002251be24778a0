"""Metrics writers: records round-trip, and writers close their files and ports."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from thinwire.errors import ConfigError
from thinwire.runtime.metrics import JsonLines, Prometheus, TensorBoard
from thinwire.telemetry import StepRecord

RECORD = StepRecord(
    step=3,
    table="fc.weight",
    numel=1000,
    rank=1,
    payload_bytes_push=200,
    payload_bytes_pull=50,
    encode_s=0.25,
    decode_s=0.5,
    wait_s=1.0,
    staleness=2,
    residual_norm=4.0,
    residual_lag=3.0,
)
PLAIN = StepRecord(step=4, table="fc.bias", numel=10, payload_bytes_push=40, payload_bytes_pull=40, skipped=True)
SCORES = StepRecord(step=4, table="", numel=0, loss=0.5, accuracy=0.75)
WHOLE = StepRecord(step=4, table="", numel=0, encode_s=0.125, link_bps=5e7)


def test_json_lines_contain_every_field_and_bits_per_value(tmp_path: Path) -> None:
    writer = JsonLines(tmp_path / "steps.jsonl")
    for record in (RECORD, replace(RECORD, numel=0)):
        writer.record(record)
    writer.close()
    first, empty = (json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines())
    extra = {"bits_per_value_push": 1.6, "bits_per_value_pull": 0.4}
    assert first == json.loads(json.dumps(asdict(RECORD))) | extra
    assert empty["bits_per_value_push"] == empty["bits_per_value_pull"] == 0


def test_json_lines_are_unbuffered_and_create_folder(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text("before\n")
    one, two = JsonLines(path), JsonLines(str(path))
    for step in range(3):
        one.record(replace(RECORD, step=step))
        two.record(replace(PLAIN, step=step))
        assert len(path.read_text().splitlines()) == 1 + 2 * (step + 1)
    one.close()
    two.close()
    lines = path.read_text().splitlines()
    assert lines[0] == "before"
    assert [json.loads(line)["step"] for line in lines[1:]] == [0, 0, 1, 1, 2, 2]
    path = tmp_path / "new" / "steps.jsonl"
    JsonLines(path).close()
    assert path.read_bytes() == b""
    with pytest.raises(ConfigError, match=r"steps\.jsonl is not a folder"):
        JsonLines(path / "more.jsonl")


def test_json_lines_write_nonfinite_norm_as_null(tmp_path: Path) -> None:
    writer = JsonLines(tmp_path / "steps.jsonl")
    writer.record(replace(RECORD, residual_norm=math.nan, residual_lag=math.inf, table='a "quoted"\nname'))
    writer.close()
    (line,) = (tmp_path / "steps.jsonl").read_text().splitlines()
    read = json.loads(line, parse_constant=lambda word: pytest.fail(word))
    assert (read["residual_norm"], read["residual_lag"], read["table"]) == (None, None, 'a "quoted"\nname')


def scrape(writer: Prometheus) -> dict[tuple[str, ...], float]:
    """The endpoint's samples: (name, table, rank, direction or phase) → value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{writer.port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {
        (
            sample.name,
            *(sample.labels[label] for label in ("table", "rank", "direction", "phase") if label in sample.labels),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_prometheus_serves_sums_and_latest_values() -> None:
    writer = Prometheus(0)
    try:
        assert scrape(writer) == {}
        writer.record(RECORD)
        writer.record(replace(RECORD, step=4, payload_bytes_push=100, staleness=0, residual_norm=5.0))
        writer.record(PLAIN)
        writer.record(SCORES)
        writer.record(WHOLE)
        served = scrape(writer)
    finally:
        writer.close()
    weight = ("fc.weight", "1")
    for name, value in {
        ("thinwire_payload_bytes_total", *weight, "push"): 300,
        ("thinwire_seconds_total", *weight, "wait"): 2.0,
        ("thinwire_steps_total", *weight): 2,
        ("thinwire_bits_per_value_push", *weight): 0.8,
        ("thinwire_residual_norm", *weight): 5.0,
        ("thinwire_step", *weight): 4,
    }.items():
        assert served[name] == value, name
    assert served["thinwire_skipped_steps_total", "fc.bias", "0"] == 1
    assert ("thinwire_residual_norm", "fc.bias", "0") not in served
    of_the_step = {key: value for key, value in served.items() if key[1] == "" and value}
    assert of_the_step == {
        ("thinwire_loss", "", "0"): 0.5,
        ("thinwire_accuracy", "", "0"): 0.75,
        ("thinwire_link_bps", "", "0"): 5e7,
        ("thinwire_seconds_total", "", "0", "encode"): 0.125,
    }


def test_tensorboard_reads_back_what_was_recorded(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writer = TensorBoard(tmp_path / "run")
    writer.record(RECORD)
    writer.record(replace(RECORD, step=4, payload_bytes_push=100))
    writer.record(PLAIN)
    writer.record(SCORES)
    writer.record(WHOLE)
    writer.close()
    writer.close()
    events = accumulator.EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    bits = [(event.step, event.value) for event in events.Scalars("bits_per_value_push/fc.weight")]
    assert bits == [(3, pytest.approx(1.6)), (4, pytest.approx(0.8))]
    assert events.Scalars("wait_s/fc.weight")[0].value == 1.0
    assert events.Scalars("skipped/fc.bias")[0].value == 1.0
    assert "residual_norm/fc.weight" in tags
    assert {"loss", "accuracy", "encode_s", "link_bps"} == {tag for tag in tags if tag.endswith("/") or "/" not in tag}
    assert "residual_norm/fc.bias" not in tags
