"""Shards without a server process: every rank of a process group serves a share of the model to all of them.

The group is used at the start: ranks look whether they plan the same, and tell the others their certificates and
addresses. All else goes over the same conversations as with servers of their own, so that both modes have one
mechanism.

Every rank draws a key and signs a throw-away certificate for it, with its rank in the name. No key travels through the
group, and no rank talks to anybody whose certificate did not: who is not in the group is not let in, and who listens on
the way reads nothing.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
import xxhash

from thinwire.errors import ConfigError, ProtocolError
from thinwire.runtime.checkpoint import Snapshot, from_plain
from thinwire.runtime.connection import has_ended
from thinwire.runtime.serving import serving
from thinwire.schema import Plan
from thinwire.security.admission import Admission, worker_name
from thinwire.security.certificates import self_signed
from thinwire.server.agreement import difference
from thinwire.server.core import ServerCore
from thinwire.transports import sockets
from thinwire.transports.addresses import is_loopback
from thinwire.transports.base import Connection, Identity
from thinwire.transports.sockets import Loop, SocketOptions, SocketServer
from thinwire.transports.trust import Tls
from thinwire.version import VERSION

_LOOK_S, _FAREWELL_S = 1.0, 2.0
"""How often it looks whether a rank has died, and for how long it then stays, so that others see who died first."""
_GROUP = "ranks.thinwire"
"""The name in every rank's certificate: a certificate is known before the address is."""
_LOOPBACK = "127.0.0.1"
_CERTIFICATE_DAYS = 3650.0
"""Longer than any run: keys end with their processes."""


class RankShards:
    """This rank's shard, and the way to everybody's. Nothing is opened before `open`.

    Args:
        group: of any backend.
        grace_s: how long a rank whose connection broke may take to come back, in seconds.

    Attributes:
        rank: this rank, in the group.
        workers: how many ranks there are.
        core: this rank's shard.
        transport: options of connections to the other ranks' shards; there once they are open.
        address: where the other ranks reach this rank's shard, once it is open.

    Raises:
        ConfigError: torch.distributed is not initialised, or this process is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup, *, grace_s: float = 60.0) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError("group=… needs torch.distributed.init_process_group() first, as in a torchrun script")
        self.rank, self.workers = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ConfigError("this process is not in the group that it was given")
        self.core = ServerCore(first=self.rank + 1)
        self.transport = SocketOptions()
        self.address = ""
        self._group, self._grace_s = group, grace_s
        self._ended = threading.Event()
        self._others: list[str] = []
        self._server: SocketServer | None = None
        self._loop: Loop | None = None

    def agree(self, plans: Sequence[Plan]) -> None:
        """Looks whether all ranks plan the same, one for each shard; every rank calls it, before `open`.

        Raises:
            ProtocolError: on all ranks, where one plans otherwise than rank 0.
        """
        packed = msgspec.msgpack.encode(plans)
        said = _gather(f"{VERSION} {xxhash.xxh3_64_hexdigest(packed)}", self._group, self.workers)
        # Of another thinwire, whose plans this one may not read, who joins is told.
        if len({*said}) == 1 or len({each.partition(" ")[0] for each in said}) > 1:
            return
        found: list[Any] = [None] * self.workers
        dist.all_gather_object(found, packed, group=self._group)
        first, *others = (msgspec.msgpack.decode(each, type=tuple[Plan, ...]) for each in found)
        for rank, theirs in enumerate(others, 1):
            for told in map(difference, first, theirs):  # options that are a rank's own are none
                if told is not None:
                    raise ProtocolError(f"rank {rank} of {self.workers} would train otherwise than rank 0: {told}")

    def open(self) -> list[str | Connection]:
        """Starts serving; returns the addresses of all ranks' shards, and to its own shard a connection.

        Every rank of the group calls it together.
        """
        host = own_host(self._group, self.rank, self.workers)
        self.transport = private_options(self._group, self.rank, self.workers)
        handler = serving(self.core, self._ended.set, grace_s=self._grace_s)
        self._loop = Loop(f"thinwire-serve-{self.rank}")
        self._server = sockets.serve(handler, f"{host}:0", options=self.transport, loop=self._loop)
        self.address = self._server.address
        found: list[str | Connection] = [*_gather(self.address, self._group, self.workers)]
        self._others = [each for each in found if isinstance(each, str) and each != self.address]
        found[self.rank] = self._server.connect(Identity(worker_name(self.rank), self.rank))
        return found

    def state_dict(self, step: int) -> dict[str, Any] | None:
        """Returns this rank's shard, for the same rank of as many ranks to go on from.

        Args:
            step: exchanges that this rank has had the answers of. Nobody has had more: its own push is missing.

        Returns:
            What `resume` takes, as `shard`; None where the shard's tensors are at different steps.
        """
        assert self._loop is not None
        found: Future[Snapshot | None] = Future()

        def take() -> None:
            try:
                found.set_result(Snapshot("shard", step, self.core.state_dict()))
            except ConfigError:
                found.set_result(None)
            except BaseException as error:
                found.set_exception(error)

        if not self._loop.post(take):
            take()  # nothing else touches the shard any more
        snapshot = found.result()
        return None if snapshot is None else {**snapshot.plain(), "rank": self.rank, "workers": self.workers}

    def resume(self, state: Mapping[str, Any] | None) -> None:
        """Takes back what `DistributedOptimizer.state_dict` returned on this rank; every rank calls it, before `open`.

        Args:
            state: None where the training begins.

        Raises:
            ConfigError: on all ranks, where one has another rank's state, one of another step, none, one without a
                shard, or a damaged one.
        """
        plain = {} if state is None else state.get("shard") or {}
        if state is None:
            mine = "none"
        elif "position" not in state and "param_groups" in state:
            mine = "one of torch's own optimizer: load it into that one, before tw.distribute is called, without resume"
        elif not plain:
            mine = (
                "one that holds no shard: it was taken in a training with servers, or where a rank's tensors were at "
                "different exchanges. Begin anew from the weights"
            )
        else:
            mine = self._take_back(plain)
        said = _gather(mine, self._group, self.workers)
        for rank, each in enumerate(said):
            if each.startswith("one "):
                raise ConfigError(f"the state that rank {rank} of {self.workers} resumes from is {each}")
        if len(set(said)) > 1:
            raise ConfigError(
                "the ranks resume from different states, "
                + ", ".join(f"rank {rank}: {each}" for rank, each in enumerate(said))
                + ". Give all of them resume=… of the newest exchange that everybody has"
            )

    def _take_back(self, plain: Any) -> str:
        """Returns what to tell the others of this rank's shard; "one …" where it is refused.

        Nothing is raised: the others wait to hear of it.
        """
        try:
            of, step = (int(plain["rank"]), int(plain["workers"])), int(plain["step"])
            if of != (self.rank, self.workers):
                return f"one of rank {of[0]} of {of[1]}: every rank saves a state of its own, and goes on with that"
            self.core.load_state_dict(from_plain(plain))
        except (ConfigError, KeyError, TypeError, ValueError, AttributeError) as error:
            return f"one whose shard is damaged ({type(error).__name__}: {error}): take another file of that step"
        return f"exchange {step}"

    def dial(self, address: str, timeout_s: float) -> Connection:
        """Opens a connection to another rank's shard, waiting so many seconds at most."""
        return sockets.connect(address, connect_timeout_s=timeout_s, options=self.transport, loop=self._loop)

    def wire_nbytes(self, connections: Sequence[Connection]) -> tuple[int, int]:
        """Returns the bytes that this rank has sent to the others and had from them, as a worker and as a shard.

        Args:
            connections: of its worker, one for each shard; that to its own is none of the wire's.
        """
        own = connections[self.rank]
        sent = sum(each.bytes_sent for each in connections if each is not own)
        received = sum(each.bytes_received for each in connections if each is not own)
        if (server := self._server) is not None:
            sent += server.bytes_sent
            received += server.bytes_received
        return sent, received

    def close(self, within_s: float) -> None:
        """Stops serving, once every rank has left or one has died.

        Args:
            within_s: how long that may take at most, in seconds: as long as ranks wait for each other in a step, where
                nothing went wrong, as a slow one still needs this shard.
        """
        until = time.monotonic() + within_s
        # One rank a look, in turn: a live one takes half a second to ask, and all may have left, or the time be over.
        pause_s = _LOOK_S / max(1, len(self._others))
        turns = itertools.cycle(self._others)
        while not self._ended.wait(min(pause_s, max(0.0, until - time.monotonic()))) and time.monotonic() < until:
            if self._others and has_ended(next(turns)):
                self._ended.wait(_FAREWELL_S)
                break
        self.stop()

    def stop(self) -> None:
        """Stops serving, whoever is still there."""
        if self._server is not None:
            self._server.stop()
        if self._loop is not None:
            self._loop.close()


def private_options(group: dist.ProcessGroup, rank: int, workers: int) -> SocketOptions:
    """Draws this rank's key; returns options with which the group's ranks alone talk. They all call it together."""
    issued = self_signed(worker_name(rank), _GROUP, days=_CERTIFICATE_DAYS)
    known = "".join(_gather(issued.certificate.decode(), group, workers)).encode()
    tls = Tls(root=known, certificate=issued.certificate, key=issued.key, server_name=_GROUP)
    return SocketOptions(tls=tls, authenticate=Admission(None))


def own_host(group: dist.ProcessGroup, rank: int, workers: int) -> str:
    """Returns the address by which the other ranks reach this one; they all call it together.

    It is the one by which this machine reaches the rendezvous. The machine that the rendezvous is on may call itself
    by a loopback address; if others are elsewhere, its address is the one by which it reaches them.

    Raises:
        ConfigError: on all ranks, where they are on several machines and nobody knows an address but loopback.
    """
    said = _gather(f"{source_address(_rendezvous())} {_machine()}", group, workers)
    hosts, machines = zip(*(each.split(" ", 1) for each in said), strict=True)
    mine = str(hosts[rank])
    elsewhere = [host for host in hosts if not is_loopback(host)]
    if not elsewhere and len(set(machines)) > 1:
        raise ConfigError(
            "the ranks are on several machines, and none knows an address at which the others reach it: set "
            "MASTER_ADDR on every rank to an address of the first machine, as torchrun does"
        )
    return source_address(elsewhere[0].strip("[]")) if is_loopback(mine) and elsewhere else mine


def _rendezvous() -> str:
    """Returns where the ranks met: as torchrun says, else as the group's own store, where that has an address."""
    if named := os.environ.get("MASTER_ADDR"):
        return named
    store: Any = dist.distributed_c10d._get_default_store()
    while (wrapped := getattr(store, "underlying_store", None)) is not None:
        store = wrapped
    return getattr(store, "host", None) or _LOOPBACK


def _machine() -> str:
    """Returns on which machine this process is, or in which container: those of one have the same loopback."""
    try:
        # Machines may have one hostname, and containers on one machine several loopbacks.
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def source_address(destination: str) -> str:
    """The address that packets of this machine to a destination come from. Nothing is sent."""
    try:
        family = socket.getaddrinfo(destination, 9, type=socket.SOCK_DGRAM)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((destination, 9))
            host = str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"MASTER_ADDR={destination!r} cannot be reached from here: {error}") from error
    return f"[{host}]" if ":" in host else host


def _gather(value: str, group: dist.ProcessGroup, workers: int) -> list[str]:
    gathered: list[str | None] = [None] * workers
    dist.all_gather_object(gathered, value, group=group)
    return [each or "" for each in gathered]
