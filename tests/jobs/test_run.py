"""One run, end to end: processes, links, the outcome's keys, and bytes that the kernel counted too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from thinwire.engines.namespaces import available
from thinwire.errors import ConfigError, EngineError
from thinwire.jobs import run as experiment
from thinwire.jobs.job import Job
from thinwire.jobs.run import choose_links, run, summarise, worker_arguments

PROMISED = {
    "design": str,
    "model": str,
    "data": str,
    "workers": int,
    "servers": int,
    "steps": int,
    "link": str,
    "seed": int,
    "seconds": float,
    "seconds_per_step": float,
    "test_accuracy": float,
    "train_loss": float,
    "payload_bytes_push": int,
    "payload_bytes_pull": int,
    "wire_bytes_push": int,
    "wire_bytes_pull": int,
    "bits_per_value_push": float,
    "bits_per_value_pull": float,
    "compression_ratio": float,
    "shaping": str,
}


def test_a_real_run() -> None:
    job = Job(design="3lc[s=1.75]", workers=2, steps=30, link="100mbit", seed=3)
    heard: list[tuple[str, str]] = []
    outcome = run(job, on_event=lambda process, event: heard.append((process, event["event"])))
    assert {key: type(outcome[key]) for key in PROMISED} == PROMISED
    assert (outcome["design"], outcome["workers"], outcome["steps"], outcome["seed"]) == ("3lc[s=1.75]", 2, 30, 3)
    assert outcome["link"] == "100mbit"
    assert sorted(process for process, event in heard if event == "done") == ["worker 0", "worker 1"]
    assert outcome["bits_per_value_push"] < 2 and outcome["compression_ratio"] > 10
    for way in ("push", "pull"):
        assert 0 < outcome[f"payload_bytes_{way}"] < outcome[f"wire_bytes_{way}"]
    assert outcome["shaping"] == ("kernel" if available()[0] else "application")
    if outcome["shaping"] == "kernel":
        for way in ("push", "pull"):
            counted = outcome[f"interface_payload_bytes_{way}"]
            assert outcome[f"wire_bytes_{way}"] == pytest.approx(counted, rel=0.03)
            assert outcome[f"interface_bytes_{way}"] > counted


def test_a_worker_that_fails_ends_the_run_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a bad data folder on one machine; the server is stopped as well."""
    usual = experiment.worker_arguments
    monkeypatch.setattr(experiment, "worker_arguments", lambda *a: [*usual(*a), "--no-such-option"])
    with pytest.raises(EngineError, match=r"worker 0 ended with exit status 2(.|\n)*stopped: .*server"):
        run(Job(workers=1, steps=5))


# ---- a shard on every worker's node


def test_a_server_on_every_workers_node() -> None:
    """Two nodes, two workers, two shards: the same weights as on nodes of their own, and less on the wire."""
    job = Job(design="fp32", workers=2, steps=10, placement="uniform")
    shaping = "kernel" if available()[0] else "auto"
    apart = run(replace(job, servers=2), shaping=shaping)
    together = run(replace(job, servers_on_workers=True), shaping=shaping)
    assert together["servers"] == 2 and together["servers_on_workers"] and not apart["servers_on_workers"]
    assert together["weights"] == apart["weights"], "where a shard lives changes no bit"
    assert together["wire_bytes_push"] == apart["wire_bytes_push"], "what was said is the same"
    if together["shaping"] == "kernel":
        # A node sends half of its worker's gradients and half of the other worker's updates, and nothing to itself.
        crossed = together["interface_payload_bytes_push"]
        said = (together["wire_bytes_push"] + together["wire_bytes_pull"]) / 2
        assert crossed == pytest.approx(said, rel=0.05)
        assert apart["interface_payload_bytes_push"] == pytest.approx(apart["wire_bytes_push"], rel=0.05)


def test_nodes_that_cannot_be_shared() -> None:
    with pytest.raises(ConfigError, match="2 servers, and one on every worker's node"):
        Job(servers=2, servers_on_workers=True)
    job = Job(workers=2, steps=2, link="10mbit", servers_on_workers=True)
    with pytest.raises(ConfigError, match="application shaping gives each process a link of its own"):
        run(job, shaping="application")


# ---- links


def test_who_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "available", lambda: (True, ""))
    assert choose_links("10mbit").shaping == "kernel"
    assert choose_links("10mbit", "application").shaping == "application"
    assert choose_links(None).shaping == choose_links("none", "application").shaping == "none"
    assert choose_links(None, "kernel").shaping == "kernel", "asked for: the counters are worth having"
    monkeypatch.setattr(experiment, "available", lambda: (False, "no tc here"))
    links = choose_links("10mbit")
    assert links.shaping == "application" and "no tc here" in links.note, "said, not silent"
    with pytest.raises(EngineError, match="the kernel cannot shape links here: no tc here"):
        choose_links("10mbit", "kernel")


@pytest.mark.parametrize(
    ("link", "shaping", "text"),
    [
        ("10", "auto", "10"),
        ("10mb", "auto", "mbit"),
        ("-1mbit", "auto", "mbit"),
        ("1mbit", "tc", "auto, kernel and app"),
    ],
)
def test_rates_and_choices_that_cannot_be(link: str, shaping: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        choose_links(link, shaping)


# ---- what is passed on, and summed up


def test_a_workers_command_line_says_all_of_the_job() -> None:
    said = {"design": "int8", "workers": 3, "steps": 9, "seed": 4, "batch": 2, "lr": 0.5, "eval_every": 1.5}
    job = Job(**said, data_root="/data", consistency="ssp[staleness=2]", servers=2, compression="by-shape")  # type: ignore[arg-type]
    command, *rest = worker_arguments(job, 2, ["10.0.0.1:7070", "10.0.0.2:7070"])
    options = list(zip(rest[::2], rest[1::2], strict=True))
    assert command == "worker"
    assert [value for option, value in options if option == "--server"] == [
        "grpc://10.0.0.1:7070",
        "grpc://10.0.0.2:7070",
    ]
    given = dict(options)
    assert given["--rank"] == "2" and given["--model"] == "mlp" and given["--data"] == "digits"
    assert given["--data-root"] == "/data" and given["--consistency"] == "ssp[staleness=2]"
    assert given["--compression"] == "by-shape"
    for key, value in said.items():
        assert given["--" + key.replace("_", "-")] == str(value)
    assert "--seconds" not in given, "what was not said is the recipe's"


def outcome_of(rank: int, **changes: Any) -> dict[str, Any]:
    traffic = {"payload_bytes_push": 100, "payload_bytes_pull": 300, "values_push": 1000, "values_pull": 1000}
    return {
        "rank": rank,
        "steps": 5,
        "seconds": 2.0,
        "seconds_per_step": 0.5,
        "train_loss": 1.0 + rank,
        "weights": "abc",
        "test_accuracy": 0.5,
        "test_loss": 1.5,
        "residual_ratio": {"w": 0.25},
        "placement": {},
        "traffic": {**traffic, "wire_bytes_push": 150, "wire_bytes_pull": 350, "wait_seconds": 1.0},
        **changes,
    }


def test_sums_are_over_workers_and_the_ratio_is_of_all_that_travelled() -> None:
    job = Job(workers=2, steps=5)
    found = summarise(job, choose_links(None), {rank: outcome_of(rank) for rank in (0, 1)}, [])
    assert (found["payload_bytes_push"], found["payload_bytes_pull"]) == (200, 600)
    assert (found["wire_bytes_push"], found["wire_bytes_pull"]) == (300, 700)
    assert (found["bits_per_value_push"], found["bits_per_value_pull"]) == (0.8, 2.4)
    assert found["compression_ratio"] == 32 * 4000 / (8 * 800)
    assert found["train_loss"] == 1.5 and found["seconds_wait"] == 1.0


def test_replicas_that_differ_are_an_error() -> None:
    outcomes = {0: outcome_of(0), 1: outcome_of(1, weights="abd")}
    with pytest.raises(EngineError, match="the workers ended with 2 different models"):
        summarise(Job(workers=2, steps=5), choose_links(None), outcomes, [])
