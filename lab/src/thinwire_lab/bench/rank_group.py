"""The ranks of one measurement: where they run, how they meet, their gates, and what their links carry.

Ranks join and warm up over unlimited links. When all of them wait the links become thin, bytes are counted, and only
then the gate opens: `begin` keeps to this order, for bytes of a warm-up are not the measurement's, and a first step
over a link that is not thin yet would be. What ranks compute and report is the benchmark's own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple, TypeVar

from thinwire.engines.events import Event
from thinwire.transports.links import Rate
from thinwire_lab.bench.roles import STOPPED, WARM, Gates, Rank, rank_command
from thinwire_lab.engines.local import LocalEngine, free_port
from thinwire_lab.engines.namespaces import Count, Fabric
from thinwire_lab.engines.starters import Starter

PORT = 29400
"""Where ranks of a fabric meet."""
R = TypeVar("R", bound=Rank)


class Traffic(NamedTuple):
    """Bytes over the links of all ranks, as the kernel counts them."""

    sent_nbytes: int
    received_nbytes: int


class RankGroup(ExitStack):
    """Ranks of one measurement, which meet at `master` and wait at the gates in `gate`; all of them end with it."""

    def __init__(
        self,
        kinds: Sequence[type[Event]],
        *,
        hosts: Sequence[str] = (),
        also: Sequence[str] = (),
        starter: Starter | None = None,
    ) -> None:
        super().__init__()
        self._hosts = list(hosts)
        self._rate = Rate(None)
        self._before: Traffic | None = None
        self._fabric: Fabric | None = None
        with ExitStack() as stack:
            self.gate = stack.enter_context(tempfile.TemporaryDirectory())
            if hosts:
                self._fabric = stack.enter_context(Fabric(dict.fromkeys([*hosts, *also], self._rate)))
            address = self._fabric.addresses[hosts[0]] if self._fabric else "127.0.0.1"
            self.master = f"{address}:{PORT if self._fabric else free_port()}"
            # By the rendezvous ranks find the address that others reach their shards by.
            environment = {"GLOO_SOCKET_IFNAME": "eth0" if self._fabric else "lo", "MASTER_ADDR": address}
            self.engine = stack.enter_context(
                LocalEngine(kinds, fabric=self._fabric, environment=environment, starter=starter)
            )
            self.enter_context(stack.pop_all())

    @property
    def where(self) -> dict[str, str]:
        """What a role has of its group."""
        return {"master": self.master, "gate": self.gate}

    def start(self, roles: Sequence[R], command: Callable[[R], list[str]] = rank_command) -> None:
        """Starts all ranks, `rank 0` and so on, evenly spread over the hosts."""
        for rank, role in enumerate(roles):
            host = self._hosts[rank * len(self._hosts) // len(roles)] if self._hosts else None
            self.engine.start(f"rank {rank}", command(role), host=host)

    def begin(self, rate: Rate | None) -> None:
        """Starts the clock of ranks that have all warmed up: thin links, then the count of bytes, then the gate."""
        self.make_thin(rate)
        if self._fabric:
            self._before = Traffic(self._carried(self._fabric.sent), self._carried(self._fabric.received))
        Gates(self.gate).open(WARM)

    def end(self, rate: Rate | None = None) -> Traffic | None:
        """Stops the clock after the ranks' last steps; returns what has passed, and lets them go on."""
        self.make_thin(rate)
        passed = self.traffic()
        Gates(self.gate).open(STOPPED)
        return passed

    def make_thin(self, rate: Rate | None) -> None:
        """Gives every link of the fabric, if there is one, this rate; None leaves them as they are."""
        if self._fabric and rate is not None and rate != self._rate:
            self._rate = rate
            self._fabric.set_rates(dict.fromkeys(self._fabric.addresses, rate))

    def traffic(self) -> Traffic | None:
        """Returns what has passed since `begin`; None before it, and without a fabric."""
        if self._fabric is None or self._before is None:
            return None
        now = (self._carried(self._fabric.sent), self._carried(self._fabric.received))
        return Traffic(*(after - before for before, after in zip(self._before, now, strict=True)))

    def _carried(self, way: Callable[[str], Count]) -> int:
        return sum(way(host).nbytes for host in self._hosts)
