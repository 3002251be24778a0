"""A training that outlives its server: every worker keeps its last states in memory, and all go back to one together.

thinwire server --insecure --listen 0.0.0.0:7070 --checkpoint shard.ckpt --checkpoint-every 20   # --resume, once killed
python examples/rollback.py --server grpc://HOST:7070 --rank 0 --workers 2                       # and --rank 1
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import thinwire as tw
from thinwire.errors import SessionLostError
from thinwire.hooks.resuming import KeptSteps

EVERY = 20  # as the server's --checkpoint-every


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The examples of a step depend on nothing else: after going back, the same ones are read again."""
    chance = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(32, 20, generator=chance)
    return inputs, inputs[:, :4].argmax(1)


def train(server: Any, rank: int, workers: int, steps: int, **options: Any) -> nn.Module:
    """Trains one worker to the last step, however often a server is killed and resumed.

    Args:
        server: address of the server, or a list of the shards'.
        rank: this worker's number.
        workers: how many there are.
        steps: to take.
        **options: of `tw.distribute`.
    """
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    kept = KeptSteps(model)
    while True:
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        try:
            with tw.distribute(
                model, inner, server=server, rank=rank, workers=workers, resume=kept, sparsity=1.0, **options
            ) as opt:
                while opt.steps_done < steps:
                    inputs, targets = batch(rank, opt.steps_done)
                    opt.zero_grad()
                    nn.functional.cross_entropy(model(inputs), targets).backward()
                    opt.step()
                    if opt.clock % EVERY == 0:
                        kept.add(opt)
                opt.sync()
            return model
        except SessionLostError as lost:
            print(f"worker {rank} goes back: {lost}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", action="append", required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=500)
    given = parser.parse_args()
    model = train(given.server, given.rank, given.workers, given.steps)
    inputs, targets = batch(given.workers, 0)
    print(f"worker {given.rank}: accuracy {(model(inputs).argmax(1) == targets).float().mean():.1%}")


if __name__ == "__main__":
    main()
