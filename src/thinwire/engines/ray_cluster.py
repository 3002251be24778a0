"""A Ray cluster for servers and workers; tensors travel by gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from thinwire.engines.events import Event
from thinwire.engines.ray_engine import RayEngine
from thinwire.extras import require
from thinwire.security.starter import options_in


@dataclass(frozen=True, kw_only=True)
class RayCluster:
    """A Ray cluster, and how its nodes trust each other.

    Args:
        address: as `ray.init` takes it, `auto` or `host:port`; None: the cluster of this process, or else a Ray of this
            machine alone.
        certs: a folder of `thinwire certs` that all nodes see; servers then listen at their nodes' addresses.
        insecure: several nodes need no certificates.
    """

    address: str | None = None
    certs: Path | None = None
    insecure: bool = False

    def check(self) -> None:
        """Raises ConfigError where Ray or gRPC are not installed."""
        require("the Ray engine", "ray", "grpc")

    def engine(
        self, kinds: Sequence[type[Event]], hosts: Sequence[str], *, roles: int, gpus: bool
    ) -> AbstractContextManager[RayEngine]:
        """Opens an engine whose hosts hold `roles` roles each; with `gpus` workers' hosts have a GPU."""
        needs = {
            host: {"CPU": float(roles), **({"GPU": 1.0} if gpus and host.startswith("worker") else {})}
            for host in hosts
        }
        protected = self.certs is not None
        return RayEngine(kinds, needs, address=self.address, protected=protected, insecure=self.insecure, lines=True)

    def private(self, rank: int | None) -> list[str]:
        """Returns the options of a worker's credentials by its rank, or the servers'."""
        if self.certs is not None:
            return options_in(self.certs.resolve(), rank)
        return ["--insecure"] if self.insecure else []
