"""Hybrid-sharded FSDP2 with one line more: parameters are sharded inside a site, gradients coded between sites.

torchrun --standalone --nproc-per-node 4 examples/fsdp2.py              # two sites of two ranks
torchrun --standalone --nproc-per-node 4 examples/fsdp2.py --sites 0    # four shards, parameters gathered in int8
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from thinwire.hooks import fsdp
from thinwire_lab.workloads.batches import Batches
from thinwire_lab.workloads.data import data
from thinwire_lab.workloads.evaluate import evaluate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=2, help="sites that hold the whole model each; 0: one mesh")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dataset = data("digits")
    batches = Batches(dataset, rank=rank, workers=world, batch=8, seed=0)
    shape = (args.sites, world // args.sites) if args.sites else (world,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    for layer in (model[1], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = fsdp.compress(model, codec="3lc", sparsity=1.0, gather=None if args.sites else "int8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    for _, (x, y) in zip(range(args.steps), batches, strict=False):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    score = evaluate(model, dataset)  # on every rank: a forward pass gathers the parameters
    if rank == 0:
        print(f"{args.steps} steps on a mesh of {shape}, test accuracy {score.accuracy:.2%}")
        print(fsdp.report(state))
    dist.barrier()  # nobody leaves while another is still at work
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
