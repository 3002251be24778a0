"""The ranks of one measurement: their hosts, rendezvous, gates and links.

Ranks join and warm up over unlimited links. When all of them wait, `begin` makes the links thin, starts the count of
bytes, and only then opens the gate: the measurement has no bytes of the warm-up and no step over an unlimited link.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TypeVar

from thinwire.engines.events import Event, Listening
from thinwire.engines.roles import START_TIMEOUT_S, own_command
from thinwire.transports.links import Rate
from thinwire_lab.bench.cells import STOPPED, WARM, Gates, Rank, rank_command
from thinwire_lab.engines.local import LocalEngine, free_port
from thinwire_lab.engines.namespaces import Fabric
from thinwire_lab.engines.starters import Starter
from thinwire_lab.jobs.cluster import SERVER

PORT = 29400
"""The rendezvous's port in a fabric."""
R = TypeVar("R", bound=Rank)


class RankGroup(ExitStack):
    """Ranks of one measurement, which meet at `master` and wait at the gates in `gate`; its end ends them."""

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
        self._before: int | None = None
        self._fabric: Fabric | None = None
        with ExitStack() as stack:
            self.gate = stack.enter_context(tempfile.TemporaryDirectory())
            if hosts:
                self._fabric = stack.enter_context(Fabric(dict.fromkeys([*hosts, *also], self._rate)))
            address = self._fabric.addresses[hosts[0]] if self._fabric else "127.0.0.1"
            self.master = f"{address}:{PORT if self._fabric else free_port()}"
            # The rendezvous gives each rank the address of its shard.
            environment = {"GLOO_SOCKET_IFNAME": "eth0" if self._fabric else "lo", "MASTER_ADDR": address}
            self.engine = stack.enter_context(
                LocalEngine(kinds, fabric=self._fabric, environment=environment, starter=starter)
            )
            self.enter_context(stack.pop_all())

    @property
    def where(self) -> dict[str, str]:
        """The fields of a role that its group decides."""
        return {"master": self.master, "gate": self.gate}

    def start(self, roles: Sequence[R], command: Callable[[R], list[str]] = rank_command, *, restarts: int = 0) -> None:
        """Starts all ranks, spread evenly over the hosts."""
        for rank, role in enumerate(roles):
            host = self._hosts[rank * len(self._hosts) // len(roles)] if self._hosts else None
            self.engine.start(f"rank {rank}", command(role), host=host, restarts=restarts)

    def start_server(self, *options: str) -> str:
        """Starts a parameter server, in a fabric without credentials; returns its address."""
        private = ["--insecure"] if self._fabric else []
        serving = own_command("server", "--listen", self.engine.listen_at(SERVER), *options, *private, "--events")
        self.engine.start(SERVER, serving, host=SERVER if self._fabric else None)
        return f"grpc://{self.engine.wait_for(SERVER, Listening, START_TIMEOUT_S).address}"

    def begin(self, rate: Rate | None) -> None:
        """Starts the clock after the warm-up: thin links, then the count of bytes, then the gate."""
        self.make_thin(rate)
        if self._fabric:
            self._before = self._total_sent()
        Gates(self.gate).open(WARM)

    def end(self) -> int | None:
        """Stops the clock after the ranks' last steps; returns the bytes sent, and opens the next gate."""
        nbytes = self.sent()
        Gates(self.gate).open(STOPPED)
        return nbytes

    def make_thin(self, rate: Rate | None) -> None:
        """Gives every link of the fabric, if there is one, this rate; None changes no link."""
        if self._fabric and rate is not None and rate != self._rate:
            self._rate = rate
            self._fabric.set_rates(dict.fromkeys(self._fabric.addresses, rate))

    def sent(self) -> int | None:
        """Returns the kernel's count of bytes that the ranks' hosts sent since `begin`; None without a fabric."""
        return None if self._before is None else self._total_sent() - self._before

    def _total_sent(self) -> int:
        assert self._fabric is not None
        return sum(self._fabric.sent(host).nbytes for host in self._hosts)
