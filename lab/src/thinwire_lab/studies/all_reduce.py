"""TernGrad's performance model: synchronous training on machines with several GPUs each (appendix B, eq. 27–30).

Gradients are summed within a machine by log₂ i exchanges between GPUs, go to the CPU once, and are summed between
machines by log₂ j exchanges. The paper has one size |g| for every hop; here each hop has its own, because a codec may
leave one alone and shrink another, and the paper does not say which size it took for ternary gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from thinwire.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Equal machines with equal GPUs.

    Args:
        gpus_per_machine: i of the paper.
        machines: j of the paper.
        gpu_bytes_per_s: between two GPUs of a machine, C_gwd.
        cpu_bytes_per_s: between a GPU and its CPU, C_cwd.
        network_bytes_per_s: between two machines, C_nwd.
        network_latency_s: of one exchange between machines, C_ncost.

    Raises:
        ConfigError: a number below 1, or a rate that is not positive.
    """

    gpus_per_machine: int
    machines: int
    gpu_bytes_per_s: float
    cpu_bytes_per_s: float
    network_bytes_per_s: float
    network_latency_s: float

    def __post_init__(self) -> None:
        if min(self.gpus_per_machine, self.machines) < 1:
            raise ConfigError(
                f"{self.machines} machines with {self.gpus_per_machine} GPUs; there is at least 1 of each"
            )
        if not min(self.gpu_bytes_per_s, self.cpu_bytes_per_s, self.network_bytes_per_s) > 0:
            raise ConfigError(f"every rate is positive, in bytes a second; these are {self}")
        if self.network_latency_s < 0:
            raise ConfigError(f"a latency of {self.network_latency_s} s; it is 0 or more")

    @property
    def gpus(self) -> int:
        """N of the paper: all GPUs together."""
        return self.gpus_per_machine * self.machines


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Bytes that one exchange moves on each hop.

    Args:
        gpu_nbytes: between two GPUs of a machine.
        cpu_nbytes: between a GPU and its CPU.
        network_nbytes: between two machines.
    """

    gpu_nbytes: float
    cpu_nbytes: float
    network_nbytes: float

    @classmethod
    def everywhere(cls, nbytes: float) -> Sent:
        """The paper's own: one size |g| on every hop."""
        return cls(gpu_nbytes=nbytes, cpu_nbytes=nbytes, network_nbytes=nbytes)


def communication_s(at: Machines, sent: Sent) -> float:
    """Returns the seconds in which a step's gradients are summed.

    |g|/C_gwd·log₂ i + |g|/C_cwd + (C_ncost + |g|/C_nwd)·log₂ j; a number that is no power of two is taken as it is.
    """
    inside = sent.gpu_nbytes / at.gpu_bytes_per_s * math.log2(at.gpus_per_machine)
    between = (at.network_latency_s + sent.network_nbytes / at.network_bytes_per_s) * math.log2(at.machines)
    return inside + sent.cpu_nbytes / at.cpu_bytes_per_s + between


def strong_step_s(at: Machines, sent: Sent, profiled_s: float, copied_nbytes: float) -> float:
    """Returns the seconds of a step whose K examples are divided among all GPUs (eq. 27).

    Args:
        at: where it runs.
        sent: bytes on each hop.
        profiled_s: T(1, 1, K, |g|), of a step of all K examples on one machine with one GPU, in seconds.
        copied_nbytes: that the profiled step copied to the CPU; float32 as a rule.

    Example:
        >>> one = dict(gpu_bytes_per_s=12e9, cpu_bytes_per_s=12e9, network_bytes_per_s=125e6, network_latency_s=50e-6)
        >>> g = 244e6
        >>> [round(strong_step_s(Machines(gpus_per_machine=i, machines=j, **one), Sent.everywhere(g), 0.2, g), 6)
        ...  for i, j in ((1, 1), (4, 1), (4, 2), (4, 128))]
        [0.2, 0.105917, 2.035508, 13.725701]
    """
    return _compute_s(at, profiled_s, copied_nbytes) / at.gpus + communication_s(at, sent)


def weak_step_s(at: Machines, sent: Sent, profiled_s: float, copied_nbytes: float) -> float:
    """Returns the seconds of a step in which every GPU has K examples (eq. 29); arguments as for `strong_step_s`.

    Example:
        >>> one = dict(gpu_bytes_per_s=12e9, cpu_bytes_per_s=12e9, network_bytes_per_s=125e6, network_latency_s=50e-6)
        >>> g = 244e6
        >>> [round(weak_step_s(Machines(gpus_per_machine=i, machines=j, **one), Sent.everywhere(g), 0.2, g), 6)
        ...  for i, j in ((1, 1), (4, 1), (4, 2), (4, 128))]
        [0.2, 0.240667, 2.192717, 13.905017]
    """
    return _compute_s(at, profiled_s, copied_nbytes) + communication_s(at, sent)


def _compute_s(at: Machines, profiled_s: float, copied_nbytes: float) -> float:
    compute_s = profiled_s - copied_nbytes / at.cpu_bytes_per_s
    if not compute_s > 0:
        raise ConfigError(
            f"a profiled step of {profiled_s:g} s is shorter than its copy of {copied_nbytes:g} bytes to the CPU at "
            f"{at.cpu_bytes_per_s:g} bytes/s; check both"
        )
    return compute_s
