"""DoubleSqueeze's entries: the paper's comparisons, and verdicts by the figures."""

from __future__ import annotations

from thinwire_lab.jobs import in_process
from thinwire_lab.jobs.job import Job
from thinwire_lab.studies.reproduce import iteration_times
from thinwire_lab.studies.reproduce.entry import Found
from thinwire_lab.studies.reproduce.iteration_times import ONE_BIT, SGD, cells, choices
from thinwire_lab.studies.reproduce.job_cells import TimedFinding


def test_sgd_equals_topk_of_all_values() -> None:
    """Two ways to spell SGD, of which one sends 32 bits a value."""
    plain, whole = (
        in_process.run(Job(design=design, codec_up=codec_up, workers=2, steps=6, batch=8))
        for design, codec_up in (choices(SGD), ("topk-sgd[fraction=1.0]", None))
    )
    assert plain.weights == whole.weights
    assert (plain.bits_per_value_push, plain.bits_per_value_pull) == (32.0, 32.0)
    assert plain.residual_ratio == {}


def test_iteration_times_slopes_and_verdicts() -> None:
    """SGD takes 10 s for each s/Mbit, what compresses one way 5, and DoubleSqueeze 0.5."""
    slope = {SGD: 10.0, "MEM-SGD 1-bit": 5.0, "QSGD": 5.0, "DoubleSqueeze 1-bit": 0.5}
    found = {
        cell: TimedFinding(
            seconds_per_step=0.01 + slope[cell.method] * iteration_times._inverse(cell.link),
            wire_bytes=1000.0 * slope[cell.method],
            shaping="none" if cell.link == "none" else "kernel",
        )
        for cell in cells(ONE_BIT, "quick")
    }
    shown = iteration_times.show("figure-3", ONE_BIT, Found(found))
    told = {line[0]: line[1:3] for line in shown.tables[1].lines}
    assert told == {
        "DoubleSqueeze 1-bit": ["nearly flat", "5.0%"],
        "MEM-SGD 1-bit": ["half or more", "50.0%"],
        "QSGD": ["half or more", "50.0%"],
        SGD: ["100 %", "100.0%"],
    }
    assert [line[0] for line in shown.tables[0].lines] == ["none", "8mbit", "4mbit"]
