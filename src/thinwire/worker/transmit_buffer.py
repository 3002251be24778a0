"""The transmit buffer: encoded gradients of one step, until a message is full. Sans-IO.

A message per tensor costs more than the tensor (30 calls cost 44 ms a step, one batch 1.3 ms), and one message per step
would leave a slow link idle during the backward pass.
"""

from __future__ import annotations

from thinwire.errors import ProtocolError
from thinwire.packets import EncodedTensor
from thinwire.schema import Changes, Plan, Push

CHUNK_NBYTES = 32 * 1024
"""A push leaves as soon as this much is ready: 3 ms at 100 Mbit/s, and a few chunks a step for small models."""


class TransmitBuffer:
    """The pushes to one shard in the step under way.

    Args:
        plan: of the shard.
        chunk_nbytes: how many bytes of frames make a push worth sending.
    """

    def __init__(self, plan: Plan, chunk_nbytes: int = CHUNK_NBYTES) -> None:
        self._plan, self._chunk_nbytes = plan, chunk_nbytes
        self._frames: list[tuple[int, EncodedTensor]] = []
        self._nbytes = 0
        self._options: Changes = ()
        self._pushed: set[int] = set()

    def add(self, clock: int, table: int, frame: EncodedTensor) -> bool:
        """Takes this step's frame of a table; returns whether enough is ready for a message.

        Raises:
            ProtocolError: the table was already pushed in this step.
        """
        self.check(clock, table)
        self._pushed.add(table)
        self._frames.append((table, frame))
        self._nbytes += len(frame)
        return self._nbytes >= self._chunk_nbytes

    def check(self, clock: int, table: int) -> None:
        """Raises ProtocolError where a table was already pushed in this step."""
        if table in self._pushed:
            raise ProtocolError(
                f"{self._plan.tables[table].name!r} was pushed twice in step {clock}: several backward passes "
                "before one step() need `with opt.no_sync():` around all but the last. A block that is checkpointed "
                "several times in one pass needs checkpoint(…, use_reentrant=False). After a pass that raised an "
                "error, gradients of it may have left: end the training there, or skip such steps with nonfinite='skip'"
            )

    def pushed(self, table: int) -> bool:
        """Whether a table has a frame in this step."""
        return table in self._pushed

    def announce(self, options: Changes) -> None:
        """These options changed: the next push carries them, before its gradients count."""
        self._options = options

    def take(
        self, clock: int, rates: tuple[float, ...], *, last: bool = False, digest: str = ""
    ) -> tuple[Push, tuple[EncodedTensor, ...]] | None:
        """Empties the buffer; returns the push and its frames, or None where there is nothing to say.

        Args:
            clock: of the gradients.
            rates: the learning rate of every parameter group.
            last: whether the training ends with this step.
            digest: of the worker's copy, where the design compares replicas.
        """
        if not self._frames and not digest:
            return None
        tables, frames = zip(*self._frames, strict=True) if self._frames else ((), ())
        self._frames, self._nbytes = [], 0
        options, self._options = self._options, ()
        push = Push(step=clock, tables=tables, rates=rates, last=last, digest=digest, options=options)
        return push, frames

    def end_step(self) -> None:
        """Ends the step: every table may be pushed again."""
        self._pushed.clear()
