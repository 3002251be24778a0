"""How ranks hear of uncompressed steps that nobody measures: one number, the least of what all of them waited for.

Every rank takes the seconds that its backward pass waited for averages, which costs it two looks at the clock. Every
few steps a tiny all-reduce beside the gradients finds the least of what they tell, and nobody waits for it before the
next step begins: so all ranks know at once, and the same, of a link that has become slower.
"""

from __future__ import annotations

import msgspec
import torch
import torch.distributed as dist

from thinwire.policies.autopilot.doubts import RECENT
from thinwire.policies.autopilot.pilot import Pilot


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
    """One rank's part. Before every step call `hear` and `ring`, and `tell` where the step will be uncompressed.

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
        return dist.get_backend(group) == dist.Backend.GLOO and not any(tensor.is_cuda for tensor in tensors)

    def waited(self, seconds: float) -> None:
        """Takes what a step has waited for."""
        waits_s = self.heard.waits_s
        waits_s.append(seconds)
        if len(waits_s) > RECENT:
            del waits_s[0]

    def forget(self) -> None:
        """What steps have waited for says nothing of those to come."""
        self.heard.waits_s.clear()

    def tell(self, pilot: Pilot) -> None:
        """Begins to find the least of what all ranks tell of their last steps, where it is time for that."""
        heard = self.heard
        heard.since += 1
        if heard.since >= pilot.alarm_every:
            heard.since = 0
            self._told.fill_(pilot.telling_s(heard.waits_s))
            self._work = self._group.allreduce([self._told], self._least)

    def hear(self) -> None:
        """Ends it.

        Raises:
            RuntimeError: a rank is gone, in gloo's words.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
            self.heard.least_s = float(self._told)

    def ring(self, pilot: Pilot, level: int) -> None:
        """Gives the controller what was heard of steps at a level; it is of the past where another is in use."""
        least_s, self.heard.least_s = self.heard.least_s, 0.0
        if least_s and level == pilot.memory.level and pilot.setting.codec is None:
            pilot.hear(least_s)
