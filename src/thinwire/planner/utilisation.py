"""How busy processes, their links and the machine are, sampled from /proc while they run.

Processor seconds of a process are those of all its threads; bytes are what its network interface has sent and received,
headers included. The kernel counts processor time in hundredths of a second, so intervals are to be much longer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")
INTERFACE = "eth0"
"""A network namespace's own."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What had been used at a time; two of them make a utilisation.

    Attributes:
        time_s: on a clock that does not run backwards.
        machine_busy_s, machine_s: of all processors together: what they computed, and all the time they had.
        processor_s: by process.
        nbytes: by process, sent and received over its interface.
    """

    time_s: float
    machine_busy_s: float
    machine_s: float
    processor_s: Mapping[str, float]
    nbytes: Mapping[str, tuple[int, int]]


def sample(pids: Mapping[str, int], proc: Path = _PROC) -> Sample:
    """Takes a sample of processes by name; those that have ended are left out."""
    seconds, nbytes = {}, {}
    for name, pid in pids.items():
        try:
            fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
            interfaces = (proc / str(pid) / "net/dev").read_text()
        except OSError:
            continue
        seconds[name] = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
        nbytes[name] = _counts(interfaces)
    machine = [int(each) / _TICKS_PER_S for each in (proc / "stat").read_text().partition("\n")[0].split()[1:9]]
    idle = machine[3] + machine[4]
    return Sample(time.monotonic(), sum(machine) - idle, sum(machine), seconds, nbytes)


def _counts(interfaces: str) -> tuple[int, int]:
    """Returns the bytes that an interface has sent and received; zeros where there is none of its name."""
    for line in interfaces.splitlines():
        name, colon, counters = line.partition(":")
        if colon and name.strip() == INTERFACE:
            numbers = counters.split()
            return int(numbers[8]), int(numbers[0])
    return 0, 0
