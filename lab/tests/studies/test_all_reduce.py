"""TernGrad's performance model: what its own equations say at their edges."""

import pytest

from thinwire.errors import ConfigError
from thinwire_lab.studies.all_reduce import Machines, Sent, communication_s, strong_step_s, weak_step_s


def machines(gpus: int, machines: int) -> Machines:
    return Machines(
        gpus_per_machine=gpus,
        machines=machines,
        gpu_bytes_per_s=10e9,
        cpu_bytes_per_s=10e9,
        network_bytes_per_s=125e6,
        network_latency_s=50e-6,
    )


def test_one_gpu_reproduces_the_profile_and_strong_scaling_is_weak_scaling_of_less_work() -> None:
    g = 100e6
    sent = Sent.everywhere(g)
    assert strong_step_s(machines(1, 1), sent, 0.2, g) == pytest.approx(0.2)
    assert weak_step_s(machines(1, 1), sent, 0.2, g) == pytest.approx(0.2)
    at = machines(4, 8)
    computing = 0.2 - g / 10e9
    assert weak_step_s(at, sent, 0.2, g) - strong_step_s(at, sent, 0.2, g) == pytest.approx(computing * (1 - 1 / 32))


def test_every_hop_has_its_own_size() -> None:
    at = machines(4, 8)
    whole = communication_s(at, Sent.everywhere(64e6))
    for hop, saved in (
        ("gpu_nbytes", 2 * 60e6 / 10e9),
        ("cpu_nbytes", 60e6 / 10e9),
        ("network_nbytes", 3 * 60e6 / 125e6),
    ):
        sizes = {"gpu_nbytes": 64e6, "cpu_nbytes": 64e6, "network_nbytes": 64e6} | {hop: 4e6}
        assert whole - communication_s(at, Sent(**sizes)) == pytest.approx(saved), hop


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="shorter than its copy of 4e\\+09 bytes"):
        weak_step_s(machines(1, 1), Sent.everywhere(4e9), 0.2, 4e9)
    with pytest.raises(ConfigError, match="0 machines with 4 GPUs"):
        machines(4, 0)
