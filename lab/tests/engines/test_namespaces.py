"""Links of the kernel limit rates, count every byte, and end with their launcher."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from thinwire.errors import EngineError
from thinwire.transports.links import Rate, parse_rate
from thinwire_lab.engines import namespaces
from thinwire_lab.engines.namespaces import Fabric, available, qdisc
from thinwire_lab.engines.system_tools import can_unshare

TEN_MBIT = parse_rate("10mbit")
WAYS: tuple[Literal["both", "out", "in"], ...] = ("both", "out", "in")

# Receives everything that each of N senders has to say, then answers each with one byte.
RECEIVE = """
import socket, sys
listener = socket.create_server((sys.argv[1], 5000))
print("up", flush=True)
peers = [listener.accept()[0] for _ in range(int(sys.argv[2]))]
for peer in peers:
    while peer.recv(1 << 20):
        pass
for peer in peers:
    peer.sendall(b"k")
"""
# Sends so many bytes and prints how many seconds it took until they were acknowledged.
SEND = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 5000))
start = time.monotonic()
peer.sendall(bytes(int(sys.argv[2])))
peer.shutdown(socket.SHUT_WR)
assert peer.recv(1) == b"k"
print(time.monotonic() - start)
"""


@pytest.fixture(scope="module")
def _permitted() -> None:
    permitted, reason = available()
    if not permitted:
        pytest.skip(f"this user cannot make network namespaces here: {reason}")


@pytest.fixture
def fabric(_permitted: None) -> Iterator[Fabric]:
    with Fabric(dict.fromkeys(("server", "worker 0", "worker 1"), TEN_MBIT)) as made:
        yield made


def transfer(fabric: Fabric, senders: list[str], nbytes: int) -> list[float]:
    """Sends `nbytes` from each sender to the server, all at once; returns the seconds of each."""
    address = fabric.addresses["server"]
    receive = fabric.inside("server", [sys.executable, "-c", RECEIVE, address, str(len(senders))])
    with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "up\n"
        running = [
            subprocess.Popen(
                fabric.inside(host, [sys.executable, "-c", SEND, address, str(nbytes)]),
                stdout=subprocess.PIPE,
                text=True,
            )
            for host in senders
        ]
        return [float(sender.communicate()[0]) for sender in running]


def holders_of(fabric: Fabric) -> list[int]:
    """Returns the processes that hold the fabric's namespaces, after a check that all namespaces differ."""
    pids = [holder.pid for holder in fabric._holders.values()]
    assert len({os.readlink(f"/proc/{pid}/ns/net") for pid in [*pids, os.getpid()]}) == len(pids) + 1
    return pids


def test_link_limits_a_hosts_receiving(fabric: Fabric) -> None:
    nbytes = 150_000
    assert max(transfer(fabric, ["worker 0", "worker 1"], nbytes)) >= 0.95 * 2 * nbytes * 8 / 10e6


def test_link_cut_one_way_or_both_keeps_counters(fabric: Fabric) -> None:
    call = "import socket, sys; print(socket.create_connection((sys.argv[1], 5001), 0.7).recv(1))"
    answer = (
        "import socket\ns = socket.create_server(('', 5001))\nprint(flush=True)\nwhile True: s.accept()[0].send(b'k')"
    )
    with subprocess.Popen(
        fabric.inside("server", [sys.executable, "-c", answer]), stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None and server.stdout.readline()

        def passes() -> bool:
            argv = fabric.inside("worker 0", [sys.executable, "-c", call, fabric.addresses["server"]])
            return subprocess.run(argv, capture_output=True).returncode == 0

        assert passes()
        for way in WAYS:
            before = fabric.sent("worker 0").nbytes, fabric.received("worker 0").nbytes
            fabric.cut("worker 0", way)
            assert not passes(), way
            fabric.set_rates({"worker 0": TEN_MBIT})
            assert passes(), way
            assert fabric.sent("worker 0").nbytes > before[0] and fabric.received("worker 0").nbytes > before[1], way
        server.kill()


def test_slower_link_delivers_queued_packets(fabric: Fabric) -> None:
    """A queue keeps its packets; a packet larger than the new burst would block all packets behind it."""
    nbytes, senders = 4_000_000, 4
    rates = [parse_rate(rate) for rate in ("100mbit", "50mbit", "200mbit", "20mbit", "100mbit", "10mbit", "30mbit")]
    fabric.set_rates(dict.fromkeys(fabric.addresses, rates[0]))
    address, changes = fabric.addresses["server"], 0
    receive = fabric.inside("server", [sys.executable, "-c", RECEIVE, address, str(senders)])
    send = fabric.inside("worker 0", [sys.executable, "-c", SEND, address, str(nbytes)])
    with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdout.readline() == "up\n"
        running = [subprocess.Popen(send, stdout=subprocess.DEVNULL) for _ in range(senders)]
        try:
            until = time.monotonic() + 30
            while any(sender.poll() is None for sender in running):
                assert time.monotonic() < until, f"not all has arrived: the link is stuck after {changes} changes"
                changes += 1
                fabric.set_rates(dict.fromkeys(fabric.addresses, rates[changes % len(rates)]))
            assert [sender.returncode for sender in running] == [0] * senders
            assert changes > len(rates), "the links have changed while packets waited"
        finally:
            server.kill()
            for sender in running:
                sender.kill()
                sender.wait()


def test_closing_leaves_no_process_and_no_namespace(fabric: Fabric) -> None:
    holders = holders_of(fabric)
    assert len(holders) == len(fabric.addresses) + 1, "one process for each host and one for the fabric"
    fabric.close()
    fabric.close()
    # Nothing else can hold a namespace: it has no name, so no mount keeps it.
    assert not any(Path(f"/proc/{pid}").exists() for pid in holders)
    with pytest.raises(EngineError, match="this fabric is closed"):
        fabric.inside("server", ["true"])
    with pytest.raises(EngineError, match="this fabric is closed"):
        fabric.sent("server")


def test_fabric_failure_explains_itself_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refuse = tmp_path / "refuse"
    refuse.write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2\nexit 1\n")
    refuse.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda tool, path=None: str(refuse))
    permitted, reason = available()
    assert not permitted
    assert reason.startswith("cannot make a network namespace: unshare failed: Operation not permitted; run as root")
    assert not can_unshare()


# What an ordinary user's command line does: it re-executes itself where it may make namespaces.
ORDINARY = """
import os, subprocess, sys
from thinwire.transports.links import parse_rate
from thinwire_lab.engines.namespaces import Fabric, available
from thinwire_lab.engines.system_tools import can_unshare, reexec_in_user_namespace

if len(sys.argv) == 1:
    assert os.geteuid() != 0
    assert not available()[0]
    if not can_unshare():
        sys.exit("no user namespaces")
    reexec_in_user_namespace([*sys.orig_argv, str(os.getpid())])
assert os.getpid() == int(sys.argv[1])
assert available() == (True, ""), available()
assert not can_unshare()
with Fabric({"a": parse_rate("10mbit"), "b": parse_rate("10mbit")}) as fabric:
    script = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(bytes(1000), ('10.77.0.2', 9))"
    subprocess.run(fabric.inside("a", [sys.executable, "-c", script]), check=True)
    assert fabric.sent("a").nbytes >= 1042
print("shaped")
"""


def test_an_ordinary_user_gets_links_in_a_user_namespace() -> None:
    source = str(Path(namespaces.__file__).parents[2])
    uid = 65534 if os.geteuid() == 0 else None  # a user without rights
    # Root's own interpreter and sources may be out of an ordinary user's reach.
    for python in (sys.executable, "/usr/bin/python3"):
        look = [python, "-c", "import sys, thinwire_lab.engines.namespaces; assert sys.version_info >= (3, 11)"]
        try:
            reachable = subprocess.run(look, user=uid, env={"PYTHONPATH": source}, capture_output=True)
        except OSError:
            continue
        if reachable.returncode == 0:
            break
    else:
        pytest.skip("no Python that an ordinary user can run reads these sources")
    done = subprocess.run(
        [python, "-c", ORDINARY], user=uid, env={"PYTHONPATH": source}, capture_output=True, text=True
    )
    if done.stderr == "no user namespaces\n":
        pytest.skip("this machine does not let ordinary users make user namespaces")
    assert (done.stdout, done.stderr, done.returncode) == ("shaped\n", "", 0)


def test_queues_at_the_measured_rates() -> None:
    for text, burst_kib, limit_kib in (("10mbit", 4, 256), ("100mbit", 16, 1024), ("1gbit", 128, 4096)):
        rate = parse_rate(text)
        assert qdisc(rate) == f"tbf rate {rate.bps}bit burst {burst_kib * 1024} limit {limit_kib * 1024}"
    assert qdisc(Rate(None)) == "pfifo limit 1000", "a queue that counts"
