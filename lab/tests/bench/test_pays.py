"""Does it pay: what is said of measured and predicted steps, and what can be asked for."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from thinwire.errors import ConfigError
from thinwire.planner.optimizers import Trainer
from thinwire.planner.peer_costs import PeerCosts
from thinwire.planner.planning import SHARING
from thinwire.planner.profile import profile
from thinwire.planner.transport_costs import TransportCosts
from thinwire.presentation.tables import markdown
from thinwire_lab.bench import pays
from thinwire_lab.bench.pay_rows import AtLink, Paid, SweptMethod, compare, pays_table
from thinwire_lab.bench.pays import PaysBench

LINKS = ("none", "10mbit")


def method(name: str) -> SweptMethod:
    return SweptMethod(model="mlp", method=name, data="digits", links=",".join(LINKS), ranks=4, seconds=1.0, seed=0)


def paid(*milliseconds: tuple[float, float], error: str | None = None) -> list[Paid]:
    """Measured and predicted, by link."""
    at = [
        AtLink(link=link, measured_s=measured / 1e3, predicted_s=predicted / 1e3)
        for link, (measured, predicted) in zip(LINKS, milliseconds, strict=False)
    ]
    return [Paid(at=at, alone_s=0.001, error=error)]


MEASURED = {
    method("none"): paid((10.0, 10.0), (100.0, 90.0)),
    method("int8"): paid((12.0, 13.0), (40.0, 40.0)),
    method("3lc[s=1.0]"): paid((13.0, 9.0), (20.0, 22.0)),
    method("auto"): paid((10.0, 9.0), (19.0, 22.0)),
    method("server:fp32"): paid((20.0, 20.0)),
    method("server:3lc[s=1.0]"): paid((19.8, 19.9)),
    method("local-sgd[h=4]"): paid((5.0, 5.0), (6.0, 6.0)),
}


def test_speedups_are_over_uncompressed_training_of_the_same_kind() -> None:
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


def test_methods_are_held_against_those_that_exchange_as_often() -> None:
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


def test_what_is_said_of_predictions_and_written_for_the_documentation() -> None:
    bench = PaysBench(models=["mlp"], methods=[each.method for each in MEASURED], links=LINKS)
    ddp, server, local = bench.notes(MEASURED)
    assert ddp == (
        "DDP hook: predictions differ from measured steps by 9% (median) and 31% (worst), 4 of 6 within 10%; "
        "1 of 2 verdicts right"
    ), "auto has no prediction of its own"
    assert "2 of 2 within 10%; 1 of 1 verdicts right" in server and "0 of 0 verdicts" in local
    pays, found = bench.tables(MEASURED)
    text = markdown(pays)
    assert "| mlp | 10mbit | DDP hook | 100 | 5.00× | 3lc[s=1.0] | 5.26× | 4.09× | 3lc[s=1.0] | right |" in text
    assert markdown(found).count("\n") == 3 + len(MEASURED)
    assert "| none | 10 (+0%) | 100 (-10%) |" in markdown(found)
    assert "| server:fp32 | 20 (+0%) | – |" in markdown(found)


def test_auto_is_predicted_from_its_own_settings_whatever_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    network = nn.Linear(60, 300)
    measured = profile(network, lambda: network(torch.randn(8, 60)).square().sum().backward(), steps=2)
    monkeypatch.setattr(pays, "measure_sharing", lambda *_, **__: SHARING)
    monkeypatch.setattr(pays, "measure_peer_costs", lambda _: PeerCosts())
    monkeypatch.setattr(pays, "measure_costs", TransportCosts)
    monkeypatch.setattr(PaysBench, "_starter", lambda _: None)

    def predicted(name: str, *methods: str) -> tuple[float, float]:
        """Of a method, and uncompressed, in seconds of a step at 100 kbit/s."""
        plan = PaysBench(models=["mlp"], methods=methods, links=LINKS)._plan(method(name))
        return pays._predicted_s(plan, method(name), 1e5), plan.step_s("fp32", 4, 1e5)

    for trainer, least, most in (("SGD", 0.0, 0.2), ("AdamW", 0.2, 0.4)):  # 3LC, 8 bits
        found = replace(measured, trainer=Trainer(name=trainer))
        monkeypatch.setattr(pays, "profile_workload", lambda *_, found=found, **__: found)
        for others in ((), ("none", "int8")):
            step_s, plain_s = predicted("auto", *others, "auto")
            assert least * plain_s < step_s < most * plain_s, (trainer, others)


def test_a_sweep_that_failed_is_told_and_tried_again() -> None:
    bench = PaysBench(models=["mlp"], methods=["none"], links=LINKS)
    [broken] = paid((10.0, 10.0), error="EngineError: rank 1 ended; last lines:\n    it was full")
    assert bench.failed(broken) and bench.line(method("none"), broken) == "mlp, none: failed: it was full"
    [whole] = paid((10.0, 12.0))
    assert bench.line(method("none"), whole).endswith("error: none 10 (+20%)")


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="none of torch's hooks"):
        PaysBench(methods=["powersgd-1"])
    with pytest.raises(ConfigError, match="unknown design 'nothing'"):
        PaysBench(methods=["server:nothing"])
    with pytest.raises(ConfigError, match="a plan is of workers in lockstep"):
        PaysBench(methods=["server:mps"])
    for name in ("3lc[s=1.0,start_step=2000]", "auto[start_step=25]"):
        with pytest.raises(ConfigError, match="start_step: every step that is measured is compressed"):
            PaysBench(methods=[name])
    with pytest.raises(ConfigError, match="nothing to measure"):
        PaysBench(models=[])
    thin, shaping = PaysBench(links=["none", "10mbit"]).thin_link()
    assert (thin, shaping) == ("10mbit", "kernel")
