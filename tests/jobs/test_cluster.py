"""Who makes the links thin, and which nodes cannot be shared."""

from __future__ import annotations

import pytest

from thinwire.errors import ConfigError, EngineError
from thinwire.jobs import cluster
from thinwire.jobs.cluster import choose_links, run_cluster


def test_who_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "available", lambda: (True, ""))
    assert choose_links("10mbit").shaping == "kernel"
    assert choose_links("10mbit", "application").shaping == "application"
    assert choose_links(None).shaping == choose_links("none", "application").shaping == "none"
    assert choose_links(None, "kernel").shaping == "kernel", "asked for: the counters are worth having"
    monkeypatch.setattr(cluster, "available", lambda: (False, "no tc here"))
    links = choose_links("10mbit")
    assert links.shaping == "application" and "no tc here" in links.note, "reported, not silent"
    with pytest.raises(EngineError, match="the kernel cannot shape links here: no tc here"):
        choose_links("10mbit", "kernel")


def test_rates_and_choices_that_cannot_be() -> None:
    for link, shaping, text in (
        ("10", "auto", "10"),
        ("10mb", "auto", "mbit"),
        ("-1mbit", "auto", "mbit"),
        ("1mbit", "tc", "auto, kernel and app"),
    ):
        with pytest.raises(ConfigError, match=text):
            choose_links(link, shaping)


def test_nodes_that_cannot_be_shared() -> None:
    def start(servers: int, shaping: str) -> None:
        links = choose_links("10mbit", shaping)
        run_cluster(links, 2, lambda *_: ["worker"], [], lambda *_: None, servers=servers, servers_on_workers=True)

    with pytest.raises(ConfigError, match="application shaping gives each process a link of its own"):
        start(2, "application")
    with pytest.raises(ConfigError, match="3 servers on the nodes of 2 workers"):
        run_cluster(choose_links(None), 2, lambda *_: [], [], lambda *_: None, servers=3, servers_on_workers=True)
