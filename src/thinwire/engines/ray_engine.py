"""Roles as actors of a Ray cluster: Ray places them, and starts them again on whichever node has room.

    driver (RayEngine) ── events() ─▶ actor (RoleActor) ── stdout ──▶ thinwire server …
    driver (RayEngine) ── events() ─▶ actor (RoleActor) ── stdout ──▶ thinwire worker …  ══ gRPC ══▶ the server

A placement group has one bundle for each host, so that Ray spreads them over its nodes. Events and commands travel
through Ray; tensors do not. A role that fails is started again in a new actor, in the same bundle, which Ray places on
another node if the first one is gone.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.engines.engine import ENVIRONMENT, Again, Command, Engine, Role
from thinwire.engines.events import Event, Said, reader
from thinwire.engines.ray_role import RoleActor
from thinwire.errors import ConfigError, EngineError
from thinwire.extras import optional

ray = optional("ray", "the Ray engine")

LOOPBACK = "127.0.0.1"
START_S = 900.0
"""Seconds for Ray to find room for all hosts, or to start an actor: it may install torch on a node first."""
_STOP_S = 10.0
_DIED = "the Ray actor died, or its node did"


class _Actor(Role):
    """A role and its actor, which answers the command with two process ids: the actor's and its child's."""

    def __init__(self, name: str, again: Again, restarts: int, optional: bool, host: str) -> None:
        super().__init__(name, again, restarts, optional)
        self.host = host
        self.handle: Any = None
        self.told: Any = None


class RayEngine(Engine[_Actor]):
    """The roles of one run on a Ray cluster.

    Args:
        kinds: the classes of the events that the roles report.
        hosts: what each host needs, as in `{"worker 0": {"CPU": 1}}`; a role takes one CPU, and the GPUs of a host of
            its own name.
        address: of the cluster, as `ray.init` takes it; None: the one that this process is connected to, or else a Ray
            on this machine that ends with this engine.
        protected: servers have certificates, and listen at their nodes' addresses. Else they listen on loopback, which
            one node alone can use.
        insecure: servers of several nodes need no certificates.
        lines: report other lines that roles print, as `Said`.

    Raises:
        ConfigError: Ray is not installed; several nodes, without certificates and not insecure.
        EngineError: no such cluster, or no room in it.
    """

    def __init__(
        self,
        kinds: Sequence[type[Event]],
        hosts: Mapping[str, Mapping[str, float]],
        *,
        address: str | None = None,
        protected: bool = False,
        insecure: bool = False,
        lines: bool = False,
    ) -> None:
        super().__init__()
        self._read, self._lines = reader(kinds), lines
        self._numbers = {host: number for number, host in enumerate(hosts)}
        self._hosts = {host: dict(needs) for host, needs in hosts.items()}
        self._pending: dict[Any, str] = {}
        self._came: deque[tuple[str, Event | int]] = deque()
        self._group: Any = None
        self._alone = False  # one node, and loopback is enough
        self.results: dict[str, Any] = {}
        self._connected = not ray.is_initialized()
        if self._connected:
            self._connect(address)
        try:
            self._reserve(protected, insecure)
        except BaseException:
            self.stop()
            raise

    @property
    def pids(self) -> dict[str, int]:
        """The processes' ids on their nodes, by name."""
        return {name: self._pids_of(actor)[1] for name, actor in self._roles.items()}

    @property
    def actor_pids(self) -> dict[str, int]:
        """The actors' process ids on their nodes, by name."""
        return {name: self._pids_of(actor)[0] for name, actor in self._roles.items()}

    def listen_at(self, host: str) -> str:
        return f"{LOOPBACK if self._alone else self._nodes()[self._numbers[host]]}:0"

    def start(
        self,
        name: str,
        command: Command,
        *,
        host: str | None = None,
        restarts: int = 0,
        again: Again | None = None,
        optional: bool = False,
    ) -> None:
        if name in self.running:
            raise ConfigError(f"a process called {name!r} has been started already; give each its own name")
        if host not in self._hosts:
            raise ConfigError(f"{name}: no host {host!r} here; there are {', '.join(self._hosts)}")
        self._roles[name] = actor = _Actor(name, again or (lambda: command), restarts, optional, host)
        self._start_actor(actor, command)

    def stop(self) -> None:
        """Asks every role to end, kills the actors, and gives back their room."""
        self._pending.clear()
        if not ray.is_initialized():  # stopped before: a call would connect to another Ray, or start one
            return
        asked = [actor.handle.stop.remote() for actor in self._roles.values() if actor.status is None]
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=_STOP_S)
        for actor in self._roles.values():
            self._kill(actor)
            actor.status = -signal.SIGTERM if actor.status is None else actor.status
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
            self._group = None
        if self._connected:
            self._connected = False
            ray.shutdown()

    def receive(self, timeout_s: float | None) -> tuple[str, Event | int] | None:
        # Actors without events answer with empty lists: one deadline covers all of these answers.
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._came:
            if not self._pending:
                return None
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=left)
            if not ready:
                return None
            for answer in ready:
                self._hear(self._roles[self._pending.pop(answer)], answer)
        name, came = self._came.popleft()
        if isinstance(came, int):
            self._roles[name].status = came
        return name, came

    def _start_again(self, role: _Actor, command: Command) -> None:
        self._kill(role)
        role.restarts, role.status = role.restarts - 1, None
        role.tail.clear()
        self._start_actor(role, command)

    def _start_actor(self, role: _Actor, command: Command) -> None:
        """Starts an actor and its command, and listens to it; actors start in parallel."""
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=self._numbers[role.host]
        )
        gpus = self._hosts[role.host].get("GPU", 0) if role.name == role.host else 0
        role.handle = ray.remote(num_cpus=1, num_gpus=gpus, scheduling_strategy=strategy)(RoleActor).remote()
        if callable(command):
            role.told = role.handle.call.remote(command)
        else:
            python = command[0] == sys.executable  # each node has its own
            role.told = role.handle.run.remote(list(command[python:]), python, ENVIRONMENT)
        self._listen(role)

    @staticmethod
    def _kill(role: _Actor) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(role.handle)

    def _connect(self, address: str | None) -> None:
        # A Ray that this engine starts claims the CPUs of all hosts, on however many cores.
        cpus = max(1, round(sum(needs.get("CPU", 0) for needs in self._hosts.values())))
        wanted = {"address": address} if address else {"address": "local", "num_cpus": cpus}
        try:
            ray.init(**wanted, log_to_driver=True, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise EngineError(f"no Ray cluster answers at {address or 'this machine'}: {error}") from error

    def _reserve(self, protected: bool, insecure: bool) -> None:
        """Takes room for all hosts."""
        self._group = ray.util.placement_group(list(self._hosts.values()), strategy="SPREAD")
        if not self._group.wait(START_S):
            there = {name: count for name, count in sorted(ray.cluster_resources().items()) if name in ("CPU", "GPU")}
            raise EngineError(
                f"the Ray cluster has found no room for {list(self._hosts.values())} within {START_S:g} s; "
                f"all its nodes together have {there}"
            )
        taken = sorted(set(self._nodes().values()))
        self._alone = not protected and len(set(self._placed().values())) == 1
        if not (protected or insecure or self._alone):
            raise ConfigError(
                f"servers and workers are on the nodes {', '.join(taken)}, and servers there need certificates: "
                "--certs DIR, a folder of `thinwire certs` that all nodes see; --insecure goes without"
            )

    def _placed(self) -> dict[int, str]:
        """Every host's present node; after a node's death Ray places the host on another one."""
        placed: dict[int, str] = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        return placed

    def _nodes(self) -> dict[int, str]:
        """Every host's address."""
        addresses = {each["NodeID"]: each["NodeManagerAddress"] for each in ray.nodes()}
        return {number: addresses[node] for number, node in self._placed().items() if node in addresses}

    def _pids_of(self, role: _Actor) -> tuple[int, int]:
        try:
            pids: tuple[int, int] = ray.get(role.told, timeout=START_S)
        except ray.exceptions.GetTimeoutError as error:
            raise EngineError(f"{role.name}: Ray has not started its actor within {START_S:g} s") from error
        except ray.exceptions.RayError as error:  # also an error of the actor itself
            raise EngineError(f"{role.name} could not be started: {error}") from error
        return pids

    def _listen(self, role: _Actor) -> None:
        self._pending[role.handle.events.remote()] = role.name

    def _hear(self, role: _Actor, answer: Any) -> None:
        """Receives the events of an actor's role, or the actor's death."""
        try:
            events = ray.get(answer)
        except ray.exceptions.RayActorError as error:  # Ray says why: a node that lacks thinwire, for example
            role.tail.extend([_DIED, *str(error).splitlines()])
            self._came.append((role.name, -signal.SIGKILL))
            return
        except ray.exceptions.RayError as error:  # what a call returned cannot travel
            role.tail.extend(str(error).splitlines())
            self._came.append((role.name, 1))
            return
        self._pids_of(role)  # raises the error of its start
        for kind, what in events:
            if kind == "ended":
                role.tail.extend(what[1])
                self._came.append((role.name, what[0]))
                return
            if kind == "result":
                self.results[role.name] = what
            elif (event := self._read(what)) is not None:
                self._came.append((role.name, event))
            else:
                role.tail.append(what)
                if self._lines:
                    self._came.append((role.name, Said(text=what)))
        self._listen(role)
