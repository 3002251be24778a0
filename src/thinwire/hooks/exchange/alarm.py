"""How ranks learn of uncompressed steps that nobody measures: one number, the least of what all of them waited for.

Every rank takes the seconds that its backward pass waited for averages, which costs it two looks at the clock. Every
few steps they tell each other, and the least of it counts: on a gradient's all-reduce (`hooks.exchange.piggyback`), or
by a tiny one beside it for which nobody waits before the next step begins. So all ranks know at once, and the same, of
a link that has become slower.
"""

from __future__ import annotations

import struct

import msgspec
import torch
import torch.distributed as dist

from thinwire.policies.autopilot.doubts import RECENT
from thinwire.policies.autopilot.pilot import Pilot

WAIT_NBYTES = 2
"""The upper half of a float32: 0.8 % too little at most."""
_FLOAT = struct.Struct("<f")


class AlarmState(msgspec.Struct):
    """What travels with a checkpoint.

    Args:
        waits_s: what the last uncompressed steps have waited for averages, on this rank.
        since: steps since it has told of them.
        least_s: what all have told last and the controller was not given yet; 0 where that is nothing.
    """

    waits_s: list[float] = []
    since: int = 0
    least_s: float = 0.0


class Alarm:
    """One rank's part. Before every step call `end_reduce` and `report`, and `due` where the step will be uncompressed.

    What is due goes to all ranks either by `begin_reduce`, or some other way and then the least of it to `take`.

    Args:
        group: all-reduces gradients on processors, by gloo.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._least = dist.AllreduceOptions()
        self._least.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]  # as the stubs have it
        self._told = torch.zeros(1, dtype=torch.float64, device="cpu")
        self._work: dist.Work | None = None
        self.state = AlarmState()

    @staticmethod
    def possible(group: dist.ProcessGroup, tensors: list[torch.Tensor]) -> bool:
        """Returns whether the host sees what all-reduces of gradients like these take."""
        host = torch.device("cpu")
        if any(tensor.is_cuda for tensor in tensors) or host not in group._device_types:
            return False
        # A group may have a backend for each kind of device, and its own name then says neither.
        return bool(group._get_backend(host).name() == dist.Backend.GLOO)

    def waited(self, seconds: float) -> None:
        """Takes what a step has waited for."""
        waits_s = self.state.waits_s
        waits_s.append(seconds)
        if len(waits_s) > RECENT:
            del waits_s[0]

    def forget(self) -> None:
        """What steps have waited for says nothing of those to come."""
        self.state.waits_s.clear()

    def due(self, pilot: Pilot) -> float | None:
        """Returns what all are to hear of this rank's last steps; None where it is not time for that, on any rank."""
        state = self.state
        state.since += 1
        if state.since < pilot.alarm_every:
            return None
        state.since = 0
        return pilot.telling_s(state.waits_s)

    def begin_reduce(self, seconds: float) -> None:
        """Begins an all-reduce of its own, which finds the least of all ranks' seconds."""
        self._told.fill_(seconds)
        self._work = self._group.allreduce([self._told], self._least)

    def take(self, least_s: float) -> None:
        """Takes the least of what all ranks have told."""
        self.state.least_s = least_s

    def end_reduce(self) -> None:
        """Ends what `begin_reduce` began.

        Raises:
            RuntimeError: a rank is gone, in gloo's words.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
            self.take(float(self._told))

    def report(self, pilot: Pilot, level: int) -> None:
        """Gives the controller the least that steps at a level waited; it is of the past where another is in use."""
        least_s, self.state.least_s = self.state.least_s, 0.0
        if least_s and level == pilot.memory.level and pilot.setting.codec is None:
            pilot.take_wait(least_s)


def pack_wait(seconds: float) -> bytes:
    """Returns what `Alarm.due` says as bytes.

    >>> unpack_wait(pack_wait(0.1)), len(pack_wait(0.1)) == WAIT_NBYTES
    (0.099609375, True)
    """
    return _FLOAT.pack(seconds)[-WAIT_NBYTES:]


def unpack_wait(data: bytes) -> float:
    """Returns what `pack_wait` packed, as all ranks read it."""
    return float(_FLOAT.unpack(data.rjust(_FLOAT.size, b"\0"))[0])
