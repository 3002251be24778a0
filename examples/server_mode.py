"""A training script with a parameter server. Workers and servers may die: started again, they go on together.

thinwire server --listen 127.0.0.1:7070 --checkpoint shard.ckpt --checkpoint-every 20 --resume=auto
python examples/server_mode.py --server grpc://127.0.0.1:7070 --workers 2 --rank 0    # and --rank 1, in any order

On several machines both ends show certificates and tokens: `thinwire certs DIR`, and `--certs DIR` here. The recipes in
examples/clusters start this script.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from tasks import Batches, evaluate, load
from torch import nn

import thinwire as tw
from thinwire.errors import SessionLostError
from thinwire.hooks.resuming import KeptSteps

EVERY = 20  # as the server's --checkpoint-every


def batch(batches: Batches, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the examples of a step, which depend on nothing else: after going back, the same ones are read again."""
    batches.step = step
    return next(batches)


def train(server: Any, rank: int, workers: int, steps: int, **options: Any) -> nn.Module:
    """Trains one worker to the last step, however often a server is killed and resumed.

    Args:
        server: address of the server, or a list of the shards'.
        rank: this worker's number.
        workers: how many there are.
        steps: to take.
        **options: of `tw.distribute`.
    """
    batches = Batches(load("digits"), rank=rank, world=workers, batch=16)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    kept = KeptSteps(model)  # the last states, in memory: all workers and servers go back to one that everybody has
    while True:
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        try:
            with tw.distribute(
                model, inner, server=server, rank=rank, workers=workers, resume=kept, sparsity=1.0, **options
            ) as opt:
                while opt.steps_done < steps:
                    inputs, targets = batch(batches, opt.steps_done)
                    opt.zero_grad()
                    nn.functional.cross_entropy(model(inputs), targets).backward()
                    opt.step()
                    if opt.clock % EVERY == 0:
                        kept.add(opt)
                opt.sync()
            return model
        except SessionLostError as lost:
            print(f"worker {rank} goes back: {lost}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="append", required=True, help="grpc://host:port; repeat for several shards")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--certs", type=Path, help="a folder with ca.pem, worker-RANK.pem, .key and .token")
    parser.add_argument("--connect-timeout", type=float, default=60.0, help="seconds to wait for the servers")
    given = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    credentials = None
    if given.certs is not None:
        mine = given.certs / f"worker-{given.rank}"
        credentials = tw.Credentials(
            ca=given.certs / "ca.pem",
            cert=mine.with_suffix(".pem"),
            key=mine.with_suffix(".key"),
            token_file=mine.with_suffix(".token"),
        )
    model = train(
        given.server,
        given.rank,
        given.workers,
        given.steps,
        credentials=credentials,
        connect_timeout_s=given.connect_timeout,
    )
    accuracy, _ = evaluate(model, load("digits"))
    print(f"worker {given.rank}: {given.steps} steps, test accuracy {accuracy:.2%}")


if __name__ == "__main__":
    main()
