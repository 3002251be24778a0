"""Other people's optimizers in the rank's training loop. Only their public classes are called, with their own settings.

Evaluations see the parameters that all ranks share. Where a method trains locally, these are the last exchange's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore

from thinwire.bench.authors import load
from thinwire.bench.methods import Method
from thinwire.errors import ConfigError, EngineError
from thinwire.policies.local_updates import LocalUpdates
from thinwire.runtime.rank_shards import source_address

SIDE = 64
"""Of a tile, in both files' default."""


class AuthorsDemo(Method):
    """DeMo: its optimizer exchanges in every step.

    Args:
        module: every rank's own; there is no DDP.
        optimizer: its parameters and rate are taken over.
        path: of the authors' file.
        options: `authors.chosen` returned them.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, path: Path, options: Mapping[str, float]
    ) -> None:
        lr = optimizer.param_groups[0]["lr"]
        demo = load("demo-authors", path)(
            module.parameters(),
            lr=lr,
            compression_decay=options["error_scale"],
            compression_topk=options["k"],
            compression_chunk=SIDE,
        )
        super().__init__(module, demo)
        self._seconds = 0.0

    @property
    def exchange_seconds(self) -> float:
        return self._seconds

    def step(self) -> None:
        began = time.perf_counter()
        super().step()
        self._seconds += time.perf_counter() - began


class AuthorsSparseLoCo(Method):
    """SparseLoCo: h steps of the recipe's optimizer, then one of theirs on what these have changed.

    Args:
        module, optimizer, path, options: as for `AuthorsDemo`; the optimizer is the inner one.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, path: Path, options: Mapping[str, float]
    ) -> None:
        super().__init__(module, optimizer)
        self._outer = load("sparseloco-authors", path)(
            module.parameters(),
            lr=options["outer_lr"],
            error_decay=options["error_scale"],
            top_k=options["k"],
            chunk_size=SIDE,
            use_quantization=True,
            quantization_bins=2 ** int(options["bits"]),
        )
        self._h, self._steps, self._seconds = int(options["h"]), 0, 0.0
        self._shared = [each.detach().clone() for each in module.parameters()]

    @property
    def exchange_seconds(self) -> float:
        return self._seconds

    def step(self) -> None:
        super().step()
        self._steps += 1
        if self._steps == self._h:
            self.finish()

    def finish(self) -> None:
        if self._steps == 0:
            return
        began = time.perf_counter()
        with torch.no_grad():
            for shared, parameter in zip(self._shared, self.model.parameters(), strict=True):
                parameter.grad = shared - parameter
                parameter.copy_(shared)
            self._outer.step()
            for shared, parameter in zip(self._shared, self.model.parameters(), strict=True):
                shared.copy_(parameter)
        self._steps = 0
        self._seconds += time.perf_counter() - began

    def shared_weights(self) -> AbstractContextManager[None]:
        return _in_place_of(self.model, self._shared)


class TorchftDiLoCo(Method):
    """torchft's DiLoCo on gloo: every rank is a replica group of one, and rank 0 has the lighthouse.

    Steps since the last exchange are lost at the end: torchft has no call that ends a round early.

    Args:
        module, optimizer, options: as for `AuthorsSparseLoCo`.
        master: host and port of rank 0.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, master: str, options: Mapping[str, float]
    ) -> None:
        try:  # no dependency of ours, and seconds to load
            coordination, local_sgd, manager, process_group = map(
                import_module,
                ("torchft.coordination", "torchft.local_sgd", "torchft.manager", "torchft.process_group"),
            )
        except ImportError as error:
            raise ConfigError(f"diloco-torchft needs torchft and what it needs: {error}") from error
        logging.getLogger("torchft").setLevel(logging.WARNING)
        super().__init__(module, optimizer)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        host = source_address(master.rpartition(":")[0])
        self._lighthouse = coordination.LighthouseServer(bind=f"{host}:0", min_replicas=ranks) if rank == 0 else None
        # It calls itself by the machine's name, which need not lead to the link that is measured.
        port = None if self._lighthouse is None else self._lighthouse.address().rpartition(":")[2]
        addresses = [f"http://{host}:{port}"]
        dist.broadcast_object_list(addresses)
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._manager = manager.Manager(
            pg=process_group.ProcessGroupGloo(timeout=timedelta(seconds=60)),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=ranks,
            use_async_quorum=False,
            rank=0,
            world_size=1,
            store_addr=host,
            store_port=self._store.port,
            lighthouse_addr=addresses[0],
            replica_id=f"rank-{rank}",
            hostname=host,
            init_sync=False,
            timeout=timedelta(seconds=600),
            quorum_timeout=timedelta(seconds=600),
        )
        fragments = fragments_of(module, int(options["fragments"]))
        momentum = options["outer_momentum"]
        outer = [
            torch.optim.SGD(each.parameters(), lr=options["outer_lr"], momentum=momentum, nesterov=momentum > 0)
            for each in fragments
        ]
        self._diloco = local_sgd.DiLoCo(
            self._manager,
            fragments,
            optimizer,
            outer,
            sync_every=int(options["h"]),
            fragment_sync_delay=int(options["delay"]),
            fragment_update_alpha=options["keep"],
        )
        self._diloco.__enter__()
        self._every, self._steps, self._exchanges = int(options["h"]) // len(fragments), 0, 0
        self._shared = [(each, each.detach().clone()) for each in module.parameters()]
        for each in outer:  # its step leaves the parameters that all ranks share, before they are merged with a rank's
            each.register_step_post_hook(self._keep)

    def step(self) -> None:
        super().step()
        self._steps += 1

    def finish(self) -> None:
        expected = self._steps // self._every
        if self._exchanges != expected:  # it goes on without an exchange that failed
            raise EngineError(f"torchft made {self._exchanges} exchanges in {self._steps} steps; expected {expected}")
        with torch.no_grad():
            for parameter, shared in self._shared:
                parameter.copy_(shared)

    def shared_weights(self) -> AbstractContextManager[None]:
        return _in_place_of(self.model, [shared for _, shared in self._shared])

    def _keep(self, outer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        self._exchanges += 1
        stepped = {id(each) for group in outer.param_groups for each in group["params"]}
        for parameter, shared in self._shared:
            if id(parameter) in stepped:
                shared.copy_(parameter.detach())

    def close(self) -> None:
        self._diloco.__exit__(None, None, None)
        self._manager.shutdown(wait=False)
        if self._lighthouse is not None:
            self._lighthouse.shutdown()
        super().close()


def fragments_of(module: nn.Module, number: int) -> list[nn.Module]:
    """The model's parameters in so many groups of about one size, as our own designs cut them."""
    parameters = list(module.parameters())
    groups = LocalUpdates(sync_every=number, fragments=number).assign([each.numel() for each in parameters])
    return [
        nn.ParameterList([each for each, group in zip(parameters, groups, strict=True) if group == wanted])
        for wanted in range(number)
    ]


@contextmanager
def _in_place_of(module: nn.Module, values: list[torch.Tensor]) -> Iterator[None]:
    """The model has these values within the block."""
    own = [each.detach().clone() for each in module.parameters()]
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), values, strict=True):
            parameter.copy_(value)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(module.parameters(), own, strict=True):
                parameter.copy_(value)
