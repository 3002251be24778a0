"""Thin links made by the kernel: a network namespace per process, joined by a bridge, each link with a rate.

    worker 0: eth0 ─── h1 ┐
    worker 1: eth0 ─── h2 ┼ br0 (the fabric's namespace)
    server:   eth0 ─── h3 ┘

A queue at each eth0 limits its host's sending, a queue at the other end of the pair its receiving. The namespaces have
no names: each lives as long as one idle holder process, which ends with the launcher, and the kernel then removes it.
Needs `ip`, `tc`, `nsenter`, `unshare` and the right to make namespaces (`system_tools`).
"""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from thinwire.engines.parent_watch import with_parent_watch
from thinwire.errors import ConfigError, EngineError
from thinwire.transports.links import Rate, burst_nbytes, parse_rate
from thinwire_lab.engines.system_tools import TIMEOUT_S, WHO_MAY, entering, find_tools, run_tool

MAX_HOSTS = 253  # the addresses 10.77.0.1 to .253
_NOTHING = "pfifo limit 0"  # a queue that drops every packet
TCP_PACKET_NBYTES = 14 + 20 + 32  # Ethernet, IPv4 and TCP headers of each packet, timestamps on

_INSTANT_BPS = 8 * 10**15

# A namespace inherits the machine's congestion control, so runs on two machines could differ. Cubic is the usual
# default, but a namespace may only set it if the machine allows it to all users; reno is always allowed, and cubic
# behaves like it on short paths. IPv6 is off because its neighbour discovery would count as traffic. The last `cat`
# holds the namespace.
_HOLDER_SCRIPT = """
cd /proc/sys/net
echo 1 > ipv6/conf/default/disable_ipv6
echo cubic > ipv4/tcp_congestion_control || echo reno > ipv4/tcp_congestion_control
echo held
exec cat
"""


@dataclass(frozen=True, slots=True)
class Count:
    """Bytes and packets that crossed one end of a link. A large segment counts as its packets."""

    nbytes: int = 0
    packets: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.nbytes + other.nbytes, self.packets + other.packets)

    @property
    def payload_nbytes(self) -> int:
        """Bytes above TCP: without the Ethernet, IP and TCP headers (timestamps on) of each packet."""
        return self.nbytes - TCP_PACKET_NBYTES * self.packets


class Fabric(AbstractContextManager["Fabric"]):
    """Hosts on one switch, each behind a link with a rate, while this object and its process live."""

    def __init__(self, rates: Mapping[str, Rate]) -> None:
        if not 1 <= len(rates) <= MAX_HOSTS:
            raise ConfigError(f"a fabric of {len(rates)} hosts; expected 1 to {MAX_HOSTS}")
        self._tools = find_tools()
        self._rates = dict(rates)
        self.addresses = {host: f"10.77.0.{number}" for number, host in enumerate(rates, start=1)}
        self._ports = {host: f"h{number}" for number, host in enumerate(rates, start=1)}
        self._holders: dict[str | None, subprocess.Popen[str]] = {}  # None is the bridge's
        # Counts of queues that set_rates has replaced by another kind, as (sent, received).
        self._carried = dict.fromkeys(rates, (Count(), Count()))
        try:
            self._hold([None, *rates])
            self._connect()
        except BaseException:
            self.close()
            raise

    def inside(self, host: str, argv: Sequence[str]) -> list[str]:
        """Returns the command that runs `argv` in a host's network, with its process id and standard streams."""
        return entering([self.namespace(host)], argv)

    def namespace(self, host: str) -> str:
        """Returns the file of a host's namespace."""
        return self._namespace(self._known(host))

    def sent(self, host: str) -> Count:
        """Returns a host's sent traffic with all Ethernet, IP and TCP headers, ACKs and retransmits."""
        return self._carried[self._known(host)][0] + self._count(host, "eth0")

    def received(self, host: str) -> Count:
        """Returns a host's received traffic, counted as in `sent`."""
        return self._carried[self._known(host)][1] + self._count(None, self._ports[host])

    def set_rates(self, rates: Mapping[str, Rate]) -> None:
        """Changes hosts' links, both ways, while they are in use. Counters continue.

        Queued packets stay, unless an unlimited link becomes limited, or the reverse: then they are lost, and TCP sends
        them again. A packet larger than the burst of a new, slower rate would never leave, and block all packets behind
        it; queued packets leave at the old rate first, which takes up to 0.2 s.
        """
        for host, rate in rates.items():
            if (rate.bps is None) != (self._rates[self._known(host)].bps is None):
                self._carried[host] = (self.sent(host), self.received(host))
        self._drain({host: rate for host, rate in rates.items() if burst_of(rate) < burst_of(self._rates[host])})
        self._replace({host: qdisc(rate) for host, rate in rates.items()})
        self._rates.update(rates)

    def cut(self, host: str, way: Literal["both", "out", "in"] = "both") -> None:
        """Drops all packets from a host (`out`), to it (`in`), or both, until `set_rates`. Counters continue."""
        if self._rates[self._known(host)].bps is not None:  # a queue of another kind has new counters
            sent, received = self._carried[host]
            sent, received = self.sent(host) if way != "in" else sent, self.received(host) if way != "out" else received
            self._carried[host] = sent, received
        if way != "in":
            self._run(host, "tc", f"qdisc replace dev eth0 root {_NOTHING}")
        if way != "out":
            self._run(None, "tc", f"qdisc replace dev {self._ports[host]} root {_NOTHING}")

    def close(self) -> None:
        """Ends the namespaces. One with a process in it stays without links until the process ends."""
        for holder in self._holders.values():
            holder.kill()
        for holder in self._holders.values():
            holder.communicate()
        self._holders.clear()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hold(self, names: Sequence[str | None]) -> None:
        """Makes a namespace for each name, all at once."""
        command = with_parent_watch([self._tools["unshare"], "--net", "--", "sh", "-c", _HOLDER_SCRIPT])
        for name in names:
            self._holders[name] = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C in the terminal is the launcher's to handle
            )
        for holder in self._holders.values():
            assert holder.stdout is not None
            if not holder.stdout.readline():
                holder.kill()
                reason = holder.communicate()[1].strip()
                raise EngineError(f"cannot make a network namespace: {reason}; {WHO_MAY}")

    def _connect(self) -> None:
        """Connects every host with the bridge and gives each end its queue."""
        links = ["link add br0 type bridge", "link set br0 up"]
        queues = []
        for host, port in self._ports.items():
            links.append(f"link add {port} type veth peer name eth0 netns {self._holders[host].pid}")
            links.append(f"link set {port} master br0 up")
            queues.append(f"qdisc replace dev {port} root {qdisc(self._rates[host])}")
        self._run(None, "ip", *links)
        self._run(None, "tc", *queues)
        for host, address in self.addresses.items():
            self._run(host, "ip", "link set lo up", f"addr add {address}/24 dev eth0", "link set eth0 up")
            self._run(host, "tc", f"qdisc replace dev eth0 root {qdisc(self._rates[host])}")

    def _known(self, host: str) -> str:
        if host not in self.addresses:
            raise ConfigError(f"no host {host!r} in this fabric; it has {', '.join(self.addresses)}")
        return host

    def _namespace(self, name: str | None) -> str:
        if name not in self._holders:
            raise EngineError("this fabric is closed; make a new one")
        return f"/proc/{self._holders[name].pid}/ns/net"

    def _run(self, name: str | None, tool: str, *lines: str) -> str:
        """Runs lines of `ip` or `tc` in a namespace, in one process; returns their output, which is JSON."""
        argv = [self._tools[tool], "-statistics", "-json", "-batch", "-"]
        return run_tool(entering([self._namespace(name)], argv), "\n".join(lines) + "\n")

    def _replace(self, queues: Mapping[str, str]) -> dict[tuple[str | None, str], dict[str, int]]:
        """Gives hosts' links their queues, at both ends; a queue of the same kind keeps its packets."""
        devices: dict[str | None, dict[str, str]] = {host: {"eth0": queue} for host, queue in queues.items()}
        devices[None] = {self._ports[host]: queue for host, queue in queues.items()}
        found = {}
        for name, changed in devices.items():
            lines = [f"qdisc replace dev {device} root {queue}" for device, queue in changed.items()]
            shown = self._run(name, "tc", *lines, *(f"qdisc show dev {device}" for device in changed)).splitlines()
            found.update({(name, device): _numbers(line) for device, line in zip(changed, shown, strict=True)})
        return found

    def _drain(self, rates: Mapping[str, Rate]) -> None:
        """Waits until no queued packet is larger than the bursts of these rates."""
        limited = [host for host, rate in rates.items() if self._rates[host].bps is not None]
        found = self._replace({host: qdisc(self._rates[host], int(burst_of(rates[host]))) for host in limited})
        until = time.monotonic() + TIMEOUT_S
        for (name, device), queue in found.items():
            last = queue["bytes"] + queue["backlog"]
            while queue["bytes"] < last:
                if time.monotonic() > until:
                    raise EngineError(f"{device}: {last - queue['bytes']} bytes have not left in {TIMEOUT_S:g} s")
                time.sleep(0.005)
                queue = self._queue(name, device)

    def _count(self, name: str | None, device: str) -> Count:
        queue = self._queue(name, device)
        return Count(queue["bytes"], queue["packets"])

    def _queue(self, name: str | None, device: str) -> dict[str, int]:
        return _numbers(self._run(name, "tc", f"qdisc show dev {device}"))


def _numbers(shown: str) -> dict[str, int]:
    """Returns the counters of a device's queue from the output of `tc -s -j`."""
    roots: list[dict[str, Any]] = [queue for queue in json.loads(shown) if queue.get("root")]
    return {key: sum(int(queue[key]) for queue in roots) for key in ("bytes", "packets", "backlog")}


def available() -> tuple[bool, str]:
    """Returns whether this process can make a `Fabric`, by making a small one, and the reason if it cannot."""
    try:
        with Fabric({"probe": Rate(10_000_000)}):
            return True, ""
    except EngineError as error:
        return False, str(error)


def burst_of(rate: Rate) -> float:
    """Returns the bytes that pass at once after a pause; the queue splits larger packets."""
    return math.inf if rate.bps is None else burst_nbytes(rate.bps)


def qdisc(rate: Rate, largest_nbytes: int | None = None) -> str:
    """Returns the arguments of `tc qdisc replace … root` for one direction of a link.

    An unlimited link gets a plain queue, because a queue counts the headers of every packet; a device without a queue
    counts those of a large segment once. The queue splits packets above the burst, and above `largest_nbytes`.

    >>> qdisc(Rate(10_000_000)), qdisc(Rate(None))
    ('tbf rate 10000000bit burst 4096 limit 262144', 'pfifo limit 1000')
    """
    if rate.bps is None:
        return "pfifo limit 1000"
    # Measured with three senders to one receiver: 256 KiB at 10 Mbit/s, 1 MiB at 100 Mbit/s and 4 MiB at 1 Gbit/s.
    # Never below 64 KiB, TCP's largest segment.
    limit_nbytes = max(65536, round(262144 * 4 ** math.log10(rate.bps / 10e6)))
    # A second bucket splits new packets. Larger packets in the queue pass it, because at this rate a packet takes less
    # than a nanosecond, the clock's unit, and costs no token.
    smaller = f" peakrate {_INSTANT_BPS}bit mtu {largest_nbytes}" if largest_nbytes else ""
    return f"tbf rate {rate.bps}bit burst {burst_nbytes(rate.bps)} limit {limit_nbytes}{smaller}"


def first_thin(links: Iterable[str]) -> str | None:
    """Returns the first limited link; None without any.

    >>> first_thin(["none", "10mbit", "1gbit"]), first_thin(["unlimited"])
    ('10mbit', None)
    """
    return next((link for link in links if parse_rate(link).bps is not None), None)
