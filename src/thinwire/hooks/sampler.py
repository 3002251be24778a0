"""A sampler for your `DataLoader` that divides the data among the current workers."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import Sampler

from thinwire.errors import ConfigError
from thinwire.hooks.optimizer import DistributedOptimizer
from thinwire.policies.sampling import SharedEpochs


class ElasticSampler(Sampler[list[int]]):
    """Yields, endlessly, the indices of the examples that this worker reads at every step.

    Each example is read at most once in an epoch, by one worker. When workers join or leave, the rest of the epoch is
    divided among the current workers. One or two batches that a worker drew and did not train on before it left are
    missing from that epoch; a worker that joins draws its first one or two batches at random. The sampler has no state:
    its position follows from `opt`, so a resumed training continues at the exact position.

    Args:
        num_examples: of the data, the same on every worker.
        opt: the result of `tw.distribute`.
        batch: examples per worker and step; the sum of all micro-batches, if gradients are accumulated.
        seed: the same on every worker.

    Raises:
        ConfigError: fewer examples than one batch for each of the plan's workers; or, when drawing, a second batch for
            one step: a `DataLoader` with `num_workers` would draw before the next step's workers are known.

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
