"""The choice of links, shared nodes, and the start and restart of processes."""

from __future__ import annotations

import pytest

from thinwire.engines.roles import Roles
from thinwire.errors import ConfigError, EngineError
from thinwire_lab.jobs import cluster
from thinwire_lab.jobs.cluster import Place, choose_links, run_cluster


def test_choose_links_by_wish_and_privileges(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_servers_on_workers_with_application_shaping_raises_config_error() -> None:
    def shared(servers: int) -> Roles:
        return Roles(workers=2, worker=lambda *_: ["worker"], servers=servers, servers_on_workers=True)

    with pytest.raises(ConfigError, match="share its link only with kernel shaping"):
        run_cluster(shared(2), Place(links=choose_links("10mbit", "application")), [], lambda *_: None)
    with pytest.raises(ConfigError, match="3 servers on the nodes of 2 workers"):
        shared(3)
    assert shared(1).hosts == ["worker 0", "worker 1"]
    assert Roles(workers=1, worker=lambda *_: ["worker"], servers=2).hosts == ["server 0", "server 1", "worker 0"]
