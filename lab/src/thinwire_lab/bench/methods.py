"""The training methods of a rank: plain DDP, a hook of torch's or ours, local updates, or FSDP2.

All methods share one training loop, which calls `model`, sets `optimizer`'s learning rates and calls `step`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from thinwire.extras import LazyModule
from thinwire.hooks import ddp
from thinwire.hooks.distribute import distribute
from thinwire.policies.auto.levels import AUTO
from thinwire.policies.designs import Design
from thinwire_lab.bench.names import POWERSGD, hook
from thinwire_lab.bench.options import ALONE
from thinwire_lab.jobs.training_loop import weights_digest

if TYPE_CHECKING:
    from thinwire_lab.bench import sharding
else:
    sharding = LazyModule("thinwire_lab.bench.sharding")

ONE_BUCKET_MB = 1_000_000
_closed: list[Method] = []
"""Keeps models until the process ends. When torch frees DDP's wrapper, it waits for gloo's thread while it holds the
interpreter's lock, and that thread may wait for the lock: a deadlock."""


class Method:
    """A model and its optimizer, without any exchange.

    Attributes:
        clips: whether clipping after the backward pass has an effect; not if gradients are sent before.
        together: whether all ranks evaluate the model together, each with a part of it.
    """

    together = False

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.clips = model, optimizer, True

    @property
    def exchange_seconds(self) -> float | None:
        """Seconds of exchanges in the training loop so far; None if the method does not measure them."""
        return None

    def step(self) -> None:
        """Takes a step with the backward pass's gradients."""
        self.optimizer.step()

    def finish(self) -> None:
        """Exchanges the changes of local steps since the last exchange."""

    def shared_weights(self) -> AbstractContextManager[None]:
        """Gives the model the ranks' common parameters within the block."""
        return nullcontext()

    def report(self) -> str:
        """Returns the report of our hook."""
        return ""

    def weights(self) -> str:
        """Returns a digest of the model's parameters, equal on all ranks."""
        return weights_digest(self.model)

    def close(self) -> None:
        """Closes the method's connections; the model stays until the process ends."""
        _closed.append(self)


class Hooked(Method):
    """DDP with a hook."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, name: str, seed: int) -> None:
        # With more than one bucket PowerSGD aborts or hangs on gloo.
        model = DistributedDataParallel(module, bucket_cap_mb=ONE_BUCKET_MB if name.startswith(POWERSGD) else None)
        super().__init__(model, optimizer)
        self._state = install(model, name, seed)

    def report(self) -> str:
        return "" if self._state is None else str(ddp.report(self._state))


class Distributed(Method):
    """A design: every rank averages a share of the model, or a parameter server averages all."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, design: Design, seed: int, server: str | None = None
    ) -> None:
        if server is None:
            self._opt = distribute(module, optimizer, group=dist.group.WORLD, design=design, seed=seed)
        else:
            rank, ranks = dist.get_rank(), dist.get_world_size()
            self._opt = distribute(module, optimizer, server=server, rank=rank, workers=ranks, design=design, seed=seed)
        super().__init__(module, self._opt)
        self.clips = not design.sends_early

    @property
    def exchange_seconds(self) -> float:
        return self._opt.traffic().get("exchange_seconds", 0.0)

    def finish(self) -> None:
        self._opt.flush()

    def shared_weights(self) -> AbstractContextManager[None]:
        return self._opt.shared_weights()

    def close(self) -> None:
        self._opt.close()
        super().close()


class Sharded(Method):
    """FSDP2 or HSDP, by the hook's name; `optimizer` makes the optimizer of the sharded parameters."""

    together = True

    def __init__(
        self, module: nn.Module, optimizer: Callable[[nn.Module], torch.optim.Optimizer], name: str, seed: int
    ) -> None:
        self._state = sharding.shard(module, name, seed=seed)
        super().__init__(module, optimizer(module))

    def report(self) -> str:
        return sharding.report(self._state)

    def weights(self) -> str:
        return sharding.digest(self.model)

    def close(self) -> None:
        dist.barrier()
        super().close()


def method(
    name: str,
    module: nn.Module,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    seed: int,
    server: str | None = None,
) -> Method:
    """Returns the method of a name; `optimizer` makes the optimizer of the model, sharded or not."""
    if name == ALONE:
        return Method(module, optimizer(module))
    named = hook(name)
    if named.sharded is not None:
        return Sharded(module, optimizer, name, seed)
    if named.design is not None:
        return Distributed(module, optimizer(module), named.design, seed, server)
    return Hooked(module, optimizer(module), name, seed)


def install(model: DistributedDataParallel, name: str, seed: int) -> ddp.ThinwireState | None:
    """Registers a hook. Returns our state where it is ours."""
    named = hook(name)
    if named.codec is not None:
        # The link is not thin yet, so a measurement of it would mislead.
        return ddp.compress(model, named.codec, start_step=named.start_step, seed=seed, measure_link=False)
    if named.auto is not None:
        return ddp.compress(model, AUTO, start_step=named.start_step, seed=seed, measure_link=False, **named.auto)
    if named.id == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif named.id == "bf16":
        model.register_comm_hook(None, bf16_hook)
    elif named.id.startswith(POWERSGD):
        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=int(named.id.removeprefix(POWERSGD)),
            start_powerSGD_iter=named.start_step,
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return None


def bf16_hook(_state, bucket):  # type: ignore[no-untyped-def]
    """Does the same as torch's bf16 hook, on gloo. It has no annotations, for DDP compares them with types."""
    buffer = bucket.buffer()
    narrow = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(narrow, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))
