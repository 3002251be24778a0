"""How ranks hear of uncompressed steps that nobody measures: one number, the least of what all of them waited for.

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


class Heard(msgspec.Struct):
    """What travels with a checkpoint.

    Args:
        waits_s: what the last uncompressed steps have waited for averages, on this rank.
        since: steps since it has told of them.
        least_s: what all have told last and the controller has not heard yet; 0 where that is nothing.
    """

    waits_s: list[float] = []
    since: int = 0
    least_s: float = 0.0


class Alarm:
    """One rank's part. Before every step call `hear` and `ring`, and `due` where the step will be uncompressed.

    What is due either goes to all ranks by `tell`, or some other way, and then the least of it to `take`.

    Args:
        group: all-reduces gradients on processors, by gloo.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._least = dist.AllreduceOptions()
        self._least.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]  # as the stubs have it
        self._told = torch.zeros(1, dtype=torch.float64)
        self._work: dist.Work | None = None
        self.heard = Heard()

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
        waits_s = self.heard.waits_s
        waits_s.append(seconds)
        if len(waits_s) > RECENT:
            del waits_s[0]

    def forget(self) -> None:
        """What steps have waited for says nothing of those to come."""
        self.heard.waits_s.clear()

    def due(self, pilot: Pilot) -> float | None:
        """Returns what all are to hear of this rank's last steps; None where it is not time for that, on any rank."""
        heard = self.heard
        heard.since += 1
        if heard.since < pilot.alarm_every:
            return None
        heard.since = 0
        return pilot.telling_s(heard.waits_s)

    def tell(self, seconds: float) -> None:
        """Begins to find the least of what all ranks tell, by an all-reduce of its own."""
        self._told.fill_(seconds)
        self._work = self._group.allreduce([self._told], self._least)

    def take(self, least_s: float) -> None:
        """Takes the least of what all ranks have told."""
        self.heard.least_s = least_s

    def hear(self) -> None:
        """Ends what `tell` began.

        Raises:
            RuntimeError: a rank is gone, in gloo's words.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
            self.take(float(self._told))

    def ring(self, pilot: Pilot, level: int) -> None:
        """Gives the controller what was heard of steps at a level; it is of the past where another is in use."""
        least_s, self.heard.least_s = self.heard.least_s, 0.0
        if least_s and level == pilot.memory.level and pilot.setting.codec is None:
            pilot.hear(least_s)


def pack_wait(seconds: float) -> bytes:
    """Returns what `Alarm.due` says as bytes.

    >>> unpack_wait(pack_wait(0.1)), len(pack_wait(0.1)) == WAIT_NBYTES
    (0.099609375, True)
    """
    return _FLOAT.pack(seconds)[-WAIT_NBYTES:]


def unpack_wait(data: bytes) -> float:
    """Returns what `pack_wait` packed, as all ranks read it."""
    return float(_FLOAT.unpack(data.rjust(_FLOAT.size, b"\0"))[0])
