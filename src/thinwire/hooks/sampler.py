"""Whose examples come next, for a `DataLoader` of your own: the data is divided among the workers that take part."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import Sampler

from thinwire.errors import ConfigError
from thinwire.hooks.optimizer import DistributedOptimizer
from thinwire.policies.sampling import SharedEpochs


class ElasticSampler(Sampler[list[int]]):
    """Yields, without an end, the numbers of the examples that this worker reads at every step.

    No example goes to two workers in an epoch, or twice to one. Where workers come or go, what is left of the epoch is
    divided among those who are there. What a worker that went away had before it and did not train on, one or two
    batches, is left out of that epoch; one that came draws its first one or two batches at random. It keeps nothing:
    where it is follows from `opt`, so a resumed training goes on exactly where it was.

    Args:
        num_examples: of the data, the same on every worker.
        opt: what `tw.distribute` returned.
        batch: examples per worker and step; those of all micro-batches, where gradients are accumulated.
        seed: the same on every worker.

    Raises:
        ConfigError: fewer examples than one batch for each of the plan's workers; or, when it is drawn from, a second
            batch for one step: a `DataLoader` with `num_workers` draws ahead of the training, which is not possible
            where the next membership is not known.

    Example:
        >>> import torch, thinwire as tw
        >>> from thinwire.hooks.sampler import ElasticSampler
        >>> from thinwire.runtime.serving import serving
        >>> from thinwire.server.core import ServerCore
        >>> from thinwire.transports.memory import MemoryServer
        >>> data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
        >>> model = torch.nn.Linear(4, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with MemoryServer(serving(ServerCore(min_workers=1))) as server:
        ...     with tw.distribute(model, sgd, server=server.connect(), workers=1) as opt:
        ...         loader = torch.utils.data.DataLoader(data, batch_sampler=ElasticSampler(64, opt, batch=8))
        ...         for x, y in loader:
        ...             opt.zero_grad()
        ...             torch.nn.functional.mse_loss(model(x), y).backward()
        ...             opt.step()
        ...             if opt.steps_done == 10:
        ...                 break
        ...         opt.sync()
        >>> x.shape, opt.memberships
        (torch.Size([8, 4]), ((0, (0,)),))
    """

    def __init__(self, num_examples: int, opt: DistributedOptimizer, *, batch: int, seed: int = 0) -> None:
        self._opt, self._drawn = opt, -1
        self._shared = SharedEpochs(num_examples, batch=batch, seed=seed, memberships=opt.memberships)

    @property
    def epoch(self) -> int:
        """Number of the epoch that the last batch belongs to, from 0."""
        return self._shared.epoch

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            step = self._opt.steps_done
            if step == self._drawn:
                raise ConfigError(
                    f"a second batch for step {step}: draw one for each opt.step(), in a DataLoader with "
                    "num_workers=0; where gradients are accumulated, split it"
                )
            if self._shared.memberships != self._opt.memberships:
                self._shared.follow(self._opt.memberships)
            self._drawn = step
            yield self._shared.rows(self._opt.rank, step).tolist()
