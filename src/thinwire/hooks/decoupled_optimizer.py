"""The optimizer of a learner that never waits: `decoupled`, or another design of local updates with a quorum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thinwire.errors import ConfigError
from thinwire.hooks.local_optimizer import LocalUpdateOptimizer
from thinwire.schema import Merged
from thinwire.worker.decoupled import Learner


class DecoupledOptimizer(LocalUpdateOptimizer):
    """The user's optimizer. A shard merges its changes with those of other learners; no step waits.

    Example::

        opt = tw.distribute(model, torch.optim.AdamW(model.parameters(), lr=4e-4), server="grpc://10.0.0.1:7070",
                            rank=rank, workers=4, design="decoupled[h=24,quorum=2,grace=1.0]")
        with opt:
            while opt.examples_merged < 1_000_000:
                x, y = next(batches)
                opt.zero_grad()
                loss(model(x), y).backward()
                opt.step(examples=len(x))
            opt.flush()          # every learner now has the same parameters
    """

    _local: Learner

    def step(self, closure: Callable[[], Any] | None = None, *, examples: float = 1.0) -> Any:
        """Takes an inner step, contributes the fragment that is due, and takes the versions that have come.

        Args:
            closure: as torch's optimizers take it.
            examples: how many examples, or tokens, the step's gradient is of; by default steps are counted. Shards
                weigh contributions by them.

        Raises:
            ConfigError: `examples` is not a positive number.
        """
        if not (isinstance(examples, int | float) and 0 < examples < 2**53):
            raise ConfigError(f"examples is {examples!r}; it is the number of examples, or tokens, of this step")
        self._examples = float(examples)
        return super().step(closure)

    def _end_step(self) -> None:
        self._local.examples += self._examples
        super()._end_step()
        self._note_merges()

    def sync(self) -> None:
        super().sync()
        self._note_merges()

    def flush(self) -> None:
        super().flush()
        self._note_merges()

    def _note_merges(self) -> None:
        for merge in self._local.pop_merges():
            self._recorder.record_merge(max(0, self.steps_done - 1), merge)

    @property
    def examples_merged(self) -> float:
        """Examples of all learners that the shared parameters hold, as the newest version here says."""
        return 0.0 if self._local.last_merge is None else self._local.last_merge.examples

    @property
    def last_merge(self) -> Merged | None:
        """The newest version that has come from the first shard: ranks, their steps and weights; None before."""
        return self._local.last_merge
