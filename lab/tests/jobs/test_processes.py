"""One run, end to end: processes, outcome, and the kernel's count of bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from typer.main import get_command

from thinwire.cli import server as server_command
from thinwire.engines.events import Event
from thinwire.errors import ConfigError, EngineError
from thinwire_lab.engines.namespaces import available
from thinwire_lab.jobs import in_process, processes
from thinwire_lab.jobs.cluster import Place, choose_links
from thinwire_lab.jobs.events import Done
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.outcome import RunOutcome
from thinwire_lab.jobs.processes import Elastic, run, worker_arguments


class Finished:
    """A run of two workers and a server behind thin links, and its events."""

    def __init__(self) -> None:
        self.job = Job(design="3lc[s=1.0]", workers=2, steps=40, link="100mbit", seed=3)
        self.events: list[tuple[str, Event]] = []
        self.outcome = run(self.job, on_event=lambda process, event: self.events.append((process, event)))


@pytest.fixture(scope="module")
def finished() -> Finished:
    return Finished()


def test_outcome_counts_the_kernels_bytes(finished: Finished) -> None:
    outcome = msgspec.to_builtins(finished.outcome)
    assert (outcome["design"], outcome["workers"], outcome["steps"], outcome["seed"]) == ("3lc[s=1.0]", 2, 40, 3)
    assert outcome["link"] == "100mbit"
    done = [process for process, event in finished.events if isinstance(event, Done)]
    assert sorted(done) == ["worker 0", "worker 1"]
    assert outcome["bits_per_value_push"] < 2 and outcome["compression_ratio"] > 10
    for way in ("push", "pull"):
        assert 0 < outcome[f"payload_bytes_{way}"] < outcome[f"wire_bytes_{way}"]
    assert outcome["shaping"] == ("kernel" if available()[0] else "application")
    for way in ("push", "pull") if available()[0] else ():
        counted = outcome[f"interface_payload_bytes_{way}"]
        assert outcome[f"wire_bytes_{way}"] == pytest.approx(counted, rel=0.03)
        assert outcome[f"interface_bytes_{way}"] > counted


def equal_parts(outcome: RunOutcome, other: RunOutcome) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns both outcomes without the figures of processes and links."""
    both = msgspec.to_builtins(outcome), msgspec.to_builtins(other)
    # Sessions over gRPC may outlive their connections, and send a little more for it.
    words = (
        "seconds",
        "compute_share",
        "wire",
        "interface",
        "curve",
        "link",
        "shaping",
        "in_process",
        "servers_on_workers",
    )
    one, two = ({k: v for k, v in each.items() if not any(word in k for word in words)} for each in both)
    return one, two


def test_run_in_one_process_has_the_same_weights(finished: Finished) -> None:
    inside = in_process.run(replace(finished.job, link=None))
    assert inside.in_process is True and inside.shaping == "none"
    one, other = equal_parts(inside, finished.outcome)
    assert one == other and one["weights"] and one["steps"] == 40


def test_servers_on_workers_share_their_links() -> None:
    """Two nodes, two workers, two shards: the same weights as elsewhere, and less on the wire."""
    job = Job(design="fp32", workers=2, steps=10, placement="uniform", servers_on_workers=True)
    together = run(job, place=Place(links=choose_links(None, "kernel" if available()[0] else "auto")))
    apart = in_process.run(replace(job, servers=2, servers_on_workers=False))
    assert together.servers == 2 and together.servers_on_workers and not apart.servers_on_workers
    one, other = equal_parts(together, apart)
    assert one == other, "where a shard runs changes no bit"
    if together.shaping == "kernel":
        # A node sends half of its worker's gradients and half of the other worker's updates, and nothing to itself.
        crossed = together.interface_payload_bytes_push
        assert crossed == pytest.approx((together.wire_bytes_push + together.wire_bytes_pull) / 2, rel=0.05)


def test_failed_worker_ends_the_run_with_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker with a bad data folder ends the run, and the server stops."""
    usual = worker_arguments
    monkeypatch.setattr(processes, "worker_arguments", lambda *a: [*usual(*a), "--no-such-option"])
    with pytest.raises(EngineError, match=r"worker 0 ended with exit status 2(.|\n)*stopped: .*server"):
        run(Job(workers=1, steps=5))


def test_worker_arguments_contain_the_whole_job() -> None:
    given: dict[str, Any] = {"design": "int8", "workers": 3, "steps": 9, "seed": 4, "batch": 2, "lr": 0.5}
    given |= {"eval_every": 1.5, "data_root": "/data", "consistency": "ssp[staleness=2]", "compression": "by-shape"}
    command, *rest = worker_arguments(Job(**given, servers=2), 2, ["10.0.0.1:7070", "10.0.0.2:7070"])
    options = list(zip(rest[::2], rest[1::2], strict=True))
    assert command == "worker"
    addresses = [value for option, value in options if option == "--server"]
    assert addresses == ["grpc://10.0.0.1:7070", "grpc://10.0.0.2:7070"]
    named = dict(options)
    assert named["--rank"] == "2" and named["--model"] == "mlp" and named["--data"] == "digits"
    for key, value in given.items():
        assert named["--" + key.replace("_", "-")] == str(value)
    assert {"--seconds", "--servers", "--link"}.isdisjoint(named), "what was not given is the recipe's"


def test_elastic_options_reach_the_servers() -> None:
    with pytest.raises(ConfigError, match="min-workers 3"):
        run(Job(workers=2, steps=1), elastic=Elastic(min_workers=3))
    given = Elastic(min_workers=2, worker_grace_s=3.0)
    server = get_command(server_command.app)
    options = server.make_context("server", given.arguments()).params
    assert (options["min_workers"], options["worker_grace_s"]) == (2, 3.0)
