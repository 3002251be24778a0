"""`bench pays`: speed-ups, predictions, and options."""

import pytest

from thinwire.errors import ConfigError
from thinwire_lab.bench.pay_rows import AtLink, Paid, SweptMethod, compare, pays_table
from thinwire_lab.bench.pays import PaysBench

LINKS = ("none", "10mbit")


def method(name: str) -> SweptMethod:
    return SweptMethod(model="mlp", method=name, data="digits", links=",".join(LINKS), ranks=4, seconds=1.0, seed=0)


def paid(*milliseconds: tuple[float, float], error: str | None = None) -> Paid:
    """Measured and predicted, by link."""
    at = [
        AtLink(link=link, measured_s=measured / 1e3, predicted_s=predicted / 1e3)
        for link, (measured, predicted) in zip(LINKS, milliseconds, strict=False)
    ]
    return Paid(at=at, alone_s=0.001, error=error)


MEASURED = {
    method("none"): paid((10.0, 10.0), (100.0, 90.0)),
    method("int8"): paid((12.0, 13.0), (40.0, 40.0)),
    method("3lc[s=1.0]"): paid((13.0, 9.0), (20.0, 22.0)),
    method("auto"): paid((10.0, 9.0), (19.0, 22.0)),
    method("server:fp32"): paid((20.0, 20.0)),
    method("server:3lc[s=1.0]"): paid((19.8, 19.9)),
    method("local-sgd[h=4]"): paid((5.0, 5.0), (6.0, 6.0)),
}


def test_pays_speedups_are_over_uncompressed_training_of_the_same_kind() -> None:
    rows = {(row.link, row.kind): row for row in compare(MEASURED)}
    assert list(rows) == [("none", "ddp"), ("none", "server"), ("10mbit", "ddp")], "local updates have none to compare"
    thin = rows["10mbit", "ddp"]
    assert (thin.best, thin.best_speedup, thin.advised, thin.right) == ("3lc[s=1.0]", 5.0, "3lc[s=1.0]", True)
    assert thin.auto_speedup == pytest.approx(100 / 19) and thin.advised_speedup == pytest.approx(90 / 22)
    free = rows["none", "ddp"]
    assert (free.advised, free.right) == ("3lc[s=1.0]", False), "what it advises takes 1.3 times as long"
    assert free.best == "int8" and free.best_speedup == pytest.approx(10 / 12)
    even = rows["none", "server"]
    assert (even.advised, even.right) == ("server:fp32", True), "one per cent is no reason to compress"


def test_pays_compares_methods_of_equal_periods() -> None:
    measured = {
        method("local-sgd[h=4,codec=fp32]"): paid((6.0, 6.0), (60.0, 60.0)),
        method("local-sgd[h=4,codec=3lc]"): paid((5.0, 5.0), (6.0, 6.0)),
        method("local-sgd[h=16,codec=fp32]"): paid((5.0, 5.0), (15.0, 15.0)),
        method("local-sgd[h=16,codec=3lc]"): paid((5.0, 5.0), (5.0, 5.0)),
        method("local-sgd[h=40,codec=3lc]"): paid((5.0, 5.0), (4.0, 4.0)),
    }
    thin = [row for row in compare(measured) if row.link == "10mbit"]
    assert [(row.period, row.best_speedup, row.advised_speedup) for row in thin] == [(4, 10.0, 10.0), (16, 3.0, 3.0)]
    assert [line[2] for line in pays_table(measured, 4).lines[2:]] == ["local updates, h=4", "local updates, h=16"]


def test_pays_tables_and_summary_of_predictions() -> None:
    bench = PaysBench(models=["mlp"], methods=[each.method for each in MEASURED], links=LINKS)
    ddp, server, local = bench.notes(MEASURED)
    assert ddp == (
        "DDP hook: predictions differ from measured steps by 9% (median) and 31% (worst), 4 of 6 within 10%; "
        "1 of 2 verdicts right"
    ), "auto has no prediction of its own"
    assert "2 of 2 within 10%; 1 of 1 verdicts right" in server and "0 of 0 verdicts" in local
    pays, found = bench.tables(MEASURED)
    lines = [" | ".join(line) for line in pays.lines]
    assert "mlp | 10mbit | DDP hook | 100 | 5.00× | 3lc[s=1.0] | 5.26× | 4.09× | 3lc[s=1.0] | right" in lines
    assert len(found.lines) == len(MEASURED)
    assert {"none | 10 (+0%) | 100 (-10%)", "server:fp32 | 20 (+0%) | –"} <= {
        " | ".join(line[-3:]) for line in found.lines
    }


def test_pays_reports_and_repeats_failed_sweeps() -> None:
    bench = PaysBench(models=["mlp"], methods=["none"], links=LINKS)
    broken = paid((10.0, 10.0), error="EngineError: rank 1 ended; last lines:\n    it was full")
    assert bench.failed(broken) and bench.line(method("none"), broken) == "mlp, none: failed: it was full"
    whole = paid((10.0, 12.0))
    assert bench.line(method("none"), whole).endswith("error: none 10 (+20%)")


def test_pays_impossible_options_raise_config_error() -> None:
    with pytest.raises(ConfigError, match="none of torch's hooks"):
        PaysBench(methods=["powersgd-1"])
    with pytest.raises(ConfigError, match="a plan is of workers in lockstep"):
        PaysBench(methods=["server:mps"])
    with pytest.raises(ConfigError, match="leave out start_step"):
        PaysBench(methods=["auto[start_step=25]"])
    with pytest.raises(ConfigError, match="nothing to measure"):
        PaysBench(models=[])
    thin, shaping = PaysBench(links=["none", "10mbit"]).thin_link()
    assert (thin, shaping) == ("10mbit", "kernel")
