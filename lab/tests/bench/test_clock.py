"""The computed clock beside a measured one: what is said of the differences."""

from thinwire.planner.transport_costs import Sharing, TransportCosts
from thinwire_lab.bench.clock import ClockBench, Clocked
from thinwire_lab.jobs.job import Job

COSTS = TransportCosts(worker_message_s=1e-4, server_message_s=2e-4, byte_s=3e-10, latency_s=4e-4)


def clocked(job: Job) -> Clocked:
    """Measured are .2 s a step with two workers and .5 with four, modelled .1 for each worker."""
    return Clocked(
        measured_s=0.2 if job.workers == 2 else 0.5,
        modelled_s=0.1 * job.workers,
        shaping="kernel",
        cores=2,
        costs=COSTS,
        sharing=Sharing(slowdown=1.0 + job.workers / 10, use=0.8),
    )


def test_differences_are_of_the_measured_seconds() -> None:
    bench = ClockBench(designs=["fp32"], links=["10mbit", "none"], workers=[2, 4], model="mlp", data="digits")
    measured = {job: [clocked(job)] for job in bench.cells()}
    [table] = bench.tables(measured)
    lines = [["0.2000", "0.2000", "+0.0%"], ["0.5000", "0.4000", "-20.0%"]]
    assert [line[-3:] for line in table.lines] == [*lines, *lines]
    messages_cost, without_limit, two, four, differences = bench.notes(measured)
    assert "100 µs of a processor at a worker and 200 at a server, a megabyte 300 µs" in messages_cost
    assert messages_cost.startswith("link 10mbit: ") and without_limit.startswith("link none: ")
    assert two.startswith("2 workers: beside the others a step takes 1.20 times the processor seconds of one in turn")
    assert four.endswith("lockstep leaves 80% of the processors in use")
    assert differences == "2 of 4 points within 10%; median 10.0%, largest 20.0%"
    job, [run] = list(measured.items())[1]
    assert "0.5000 s measured (kernel), 0.4000 s modelled" in bench.line(job, run)
