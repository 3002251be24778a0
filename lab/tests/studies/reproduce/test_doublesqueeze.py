"""DoubleSqueeze's entries: what is compared is what the paper compares, and verdicts follow the figures."""

from __future__ import annotations

import math

import pytest

from thinwire_lab.jobs import in_process
from thinwire_lab.jobs.history import StepHistory
from thinwire_lab.jobs.job import Job
from thinwire_lab.studies.reproduce import iteration_times, speedup
from thinwire_lab.studies.reproduce.catalog import entries
from thinwire_lab.studies.reproduce.iteration_times import TimedCell, TimedFinding, cells, modelled_s
from thinwire_lab.studies.reproduce.plain_sgd import ONE_BIT, SGD, TOP_K, PlainCell, choices
from thinwire_lab.studies.reproduce.trainings import TrainingFinding


def timed(method: str, link: str) -> TimedCell:
    return TimedCell.of(method, model="mlp", data="digits", link=link, workers=8)


def test_sgd_is_what_topk_of_all_values_computes() -> None:
    """Two ways to spell SGD, of which one sends 32 bits a value."""
    plain, whole = (
        in_process.run(Job(design=design, codec_up=codec_up, workers=2, steps=6, batch=8))
        for design, codec_up in (choices(SGD), ("topk-sgd[fraction=1.0]", None))
    )
    assert plain.weights == whole.weights
    assert (plain.bits_per_value_push, plain.bits_per_value_pull) == (32.0, 32.0)
    assert plain.residual_ratio == {}


def test_full_scale_is_the_papers() -> None:
    full = {entry.item: list(entry.study.cells("full")) for entry in entries("doublesqueeze") if entry.study}
    for item in ("figure-1", "figure-2", "figure-4", "figure-5"):
        assert {cell.workers for cell in full[item]} == {8}, item
        assert {cell.method for cell in full[item]} == set(ONE_BIT if item < "figure-3" else TOP_K), item
        assert len({cell.seed for cell in full[item]}) == 3, item
        assert len({(cell.lr, cell.batch, cell.steps, cell.model, cell.data) for cell in full[item]}) == 1, item
    for item in ("figure-3", "figure-6"):
        links = {cell.link for cell in full[item]}
        at = sorted(iteration_times._inverse(link) for link in links)
        assert len(at) == 9 and at == pytest.approx([0.0125 * each for each in range(9)], abs=1e-5), item


def test_modelled_seconds_are_bytes_over_the_rate_and_computing() -> None:
    """SGD's and MEM-SGD's frames are long, so that the link hides all else; without a limit computing is all."""
    assert modelled_s(timed(SGD, "none"), 0.25) == pytest.approx(0.25)
    sgd, memory, both = (
        modelled_s(timed(each, "1mbit"), 0.01) for each in (SGD, "MEM-SGD 1-bit", "DoubleSqueeze 1-bit")
    )
    one_way = 8 * 17_226 * 4 * 8 / 1e6 * 1514 / 1448  # eight workers, bits, a megabit a second
    assert one_way < sgd < 2.1 * one_way, "what comes back overlaps with what still goes, layer by layer"
    assert one_way < memory < 1.1 * one_way
    assert both < 0.1 * one_way


def test_steepness_and_verdicts_of_told_seconds() -> None:
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
    shown = iteration_times.show("figure-3", ONE_BIT, found)
    told = {line[0]: line[1:3] for line in shown.tables[2].lines}
    assert told == {
        "DoubleSqueeze 1-bit": ["nearly flat", "5.0%"],
        "MEM-SGD 1-bit": ["half or more", "50.0%"],
        "QSGD": ["half or more", "50.0%"],
        SGD: ["100 %", "100.0%"],
    }
    measured, modelled = shown.tables[:2]
    assert [line[0] for line in measured.lines] == ["none", "8mbit", "4mbit"]
    assert [line[0] for line in modelled.lines] == ["8mbit", "4mbit"], "the model takes the first as given"
    assert "links shaped by the kernel" in shown.setting


def remarks(item: str, losses: dict[str, float]) -> dict[str, str]:
    """The remarks of a figure whose trainings end at these losses, and all others at SGD's."""
    [study] = [entry.study for entry in entries("doublesqueeze") if entry.item == item]
    assert study is not None
    found = {}
    for cell in study.cells("quick"):
        history = StepHistory(
            losses=[losses.get(cell.method, losses[SGD])],
            bits_push=[1.0],
            bits_pull=[1.0],
            payload_bytes_push=[1],
            payload_bytes_pull=[1],
            lags=[1.0],
        )
        found[cell] = TrainingFinding(
            evaluations=[(1, 0.9)],
            test_loss=1.0,
            bits_push=1.0,
            bits_pull=1.0,
            compression_ratio=1.0,
            lag=1.0,
            lr=0.1,
            batch=16,
            weights="",
            history=history,
        )
    return {line[0]: line[-1] for line in study.show(found).tables[0].lines}


def test_remarks_say_no_more_than_the_paper_prints() -> None:
    """Slower is slower: whether a little or much stands in its words alone."""
    told = remarks("figure-4", {SGD: 0.25, "Top-k SGD": 1.0, "MEM-SGD top-k": 0.5})
    assert told == {
        "DoubleSqueeze top-k": "as there",
        "MEM-SGD top-k": "here slower than SGD",
        "Top-k SGD": "slower, as there",
        SGD: "",
    }
    assert remarks("figure-1", {SGD: 0.25, "QSGD": 1.0})["QSGD"] == "slower, as there"
    assert remarks("figure-1", {SGD: 0.25, "QSGD": 0.3})["QSGD"] == "here like SGD"


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_what_diverged_is_neither_like_sgd_nor_slower(loss: float) -> None:
    told = remarks("figure-4", {SGD: 0.25, "Top-k SGD": loss, "DoubleSqueeze top-k": loss})
    assert told["Top-k SGD"] == told["DoubleSqueeze top-k"] == "diverged" and told["MEM-SGD top-k"] == "as there"
    told = remarks("figure-4", {SGD: loss, "DoubleSqueeze top-k": 0.25})
    assert (told[SGD], told["DoubleSqueeze top-k"]) == ("diverged", "SGD diverged")


def test_all_numbers_of_workers_see_as_many_examples() -> None:
    for scale in ("quick", "full"):
        made = speedup.cells(scale)
        assert {cell.workers * cell.steps for cell in made} == {speedup._EXAMPLES[scale] // speedup.BATCH}
        assert {(cell.workers, cell.lr) for cell in made} == {
            *((n, speedup.LR_OF_ONE * n) for n in (1, 2, 4, 8)),
            (1, speedup.LR_OF_ONE * 8),
        }


def test_a_cell_says_what_runs_and_two_never_look_alike() -> None:
    made = [cell for entry in entries("doublesqueeze") if entry.study for cell in entry.study.cells("full")]
    unique = list(dict.fromkeys(made))
    assert len({str(cell) for cell in unique}) == len(unique)
    assert all(cell.job() for cell in unique if isinstance(cell, PlainCell | TimedCell))


def test_a_short_run_of_real_processes() -> None:
    [cell] = [each for each in cells([SGD], "tiny") if each.link == "100mbit"]
    finding = cell.run(lambda *_: None)
    least = cell.workers * 17_226 * 4 * 8 / 100e6
    assert finding.seconds_per_step > least and finding.shaping in ("kernel", "application")
    assert finding.wire_bytes == pytest.approx(2 * cell.workers * 17_226 * 4, rel=0.05)
