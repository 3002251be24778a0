"""Gradient accumulation: backward passes under `no_sync` send nothing, the last one of each group sends the sum.

torchrun --standalone --nproc-per-node 2 examples/ddp_accumulate.py --accumulate 4
"""

import argparse
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.hooks import ddp
from thinwire_lab.workloads.batches import Batches
from thinwire_lab.workloads.data import data
from thinwire_lab.workloads.evaluate import evaluate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--accumulate", type=int, default=4, help="backward passes for each optimizer step")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dataset = data("digits")
    batches = Batches(dataset, rank=rank, workers=world, batch=8, seed=0)

    model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    state = ddp.compress(model, codec="3lc", sparsity=1.0, entropy="zstd")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    for _ in range(args.steps):
        optimizer.zero_grad()
        for part in range(args.accumulate):
            x, y = next(batches)
            last = part == args.accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():
                (nn.functional.cross_entropy(model(x), y) / args.accumulate).backward()
        optimizer.step()

    if rank == 0:
        print(f"{state.step} exchanges for {args.steps * args.accumulate} backward passes")
        print(f"test accuracy {evaluate(model.module, dataset).accuracy:.2%}")
    dist.barrier()  # nobody leaves while another is still at work
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
