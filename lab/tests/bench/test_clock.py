"""The computed clock beside a measured one: the grid, and what is said of the differences."""

import pytest

from lab.tests.jobs.outcomes import run_outcome
from thinwire.planner.transport_costs import Sharing, TransportCosts
from thinwire_lab.bench import clock
from thinwire_lab.bench.clock import ClockBench, Clocked
from thinwire_lab.jobs import grid, modelled
from thinwire_lab.jobs.cluster import Links
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import RunOutcome
from thinwire_lab.jobs.results import Results


def test_differences_are_of_the_measured_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    measures, beside_others = [], []

    def messages(links: Links) -> TransportCosts:
        measures.append((str(links.rate), links.shaping))
        return TransportCosts(worker_message_s=1e-4, server_message_s=2e-4, byte_s=3e-10, latency_s=4e-4)

    def beside(model: str, data: str, *, ranks: int, copies: int) -> Sharing:
        assert (model, data, copies) == ("mlp", "digits", ranks)
        beside_others.append(ranks)
        return Sharing(slowdown=1.0 + ranks / 10, use=0.8)

    def computed(job: Job, *, cores: int, costs: TransportCosts, sharing: Sharing) -> RunOutcome:
        assert cores >= 1 and costs.latency_s == 4e-4 and sharing.slowdown == 1.0 + job.workers / 10
        return run_outcome(seconds_per_step=0.1 * job.workers, shaping="modelled")

    def processes(job: Job, **_: object) -> RunOutcome:
        return run_outcome(seconds_per_step=0.2 if job.workers == 2 else 0.5, shaping="kernel")

    monkeypatch.setattr(clock, "measure_costs", messages)
    monkeypatch.setattr(clock, "measure_sharing", beside)
    monkeypatch.setattr(modelled, "run", computed)
    monkeypatch.setattr(clock, "run", processes)
    bench = ClockBench(
        designs=["fp32"], links=["10mbit", "none"], workers=[2, 4], model="mlp", data="digits", shaping="application"
    )
    measured: dict[Job, list[Clocked]] = {}
    grid.run(bench, Results(None, bench.kinds), measured)
    [table] = bench.tables(measured)
    lines = [["0.2000", "0.2000", "+0.0%"], ["0.5000", "0.4000", "-20.0%"]]
    assert [line[-3:] for line in table.lines] == [*lines, *lines]
    messages_cost, without_limit, two, four, differences = bench.notes(measured)
    assert "100 µs of a processor at a worker and 200 at a server, a megabyte 300 µs" in messages_cost
    assert messages_cost.startswith("link 10mbit: ") and without_limit.startswith("link none: ")
    assert two.startswith("2 workers: beside the others a step takes 1.20 times the processor seconds of one in turn")
    assert four.endswith("lockstep leaves 80% of the processors in use") and beside_others == [2, 4], "once for each"
    assert differences == "2 of 4 points within 10%; median 10.0%, largest 20.0%"
    assert measures == [("10mbit", "application"), ("none", "none")], "once behind each link"
    assert "0.5000 s measured (kernel), 0.4000 s modelled" in bench.line(
        *[(job, run) for job, [run] in measured.items()][1]
    )
