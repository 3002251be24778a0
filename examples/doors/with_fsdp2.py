"""FSDP2, or with `--sites 2` HSDP: parameters are sharded inside a site, and gradients coded between sites.

torchrun --standalone --nproc-per-node 4 examples/doors/with_fsdp2.py --folder run --epochs 2 --sites 2
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from task import BATCH, examples, net, say
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from thinwire.hooks import fsdp  # thinwire


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoint is, or will be")
    parser.add_argument("--epochs", type=int, default=2, help="train up to this epoch")
    parser.add_argument("--sites", type=int, default=0, help="sites that hold the whole model each; 0: one mesh")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shape = (args.sites, ranks // args.sites) if args.sites else (ranks,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])

    model = net()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    kept = {"model": model}
    kept["thinwire"] = fsdp.compress(model, codec="3lc", sparsity=1.0)  # thinwire
    sampler = DistributedSampler(examples(ranks), shuffle=False)
    loader = DataLoader(examples(ranks), batch_size=BATCH, sampler=sampler)

    place = args.folder / "checkpoint"
    saved = {"epoch": torch.tensor(0), **{name: each.state_dict() for name, each in kept.items()}}
    if place.exists():
        dcp.load(saved, checkpoint_id=place)
        for name, each in kept.items():
            each.load_state_dict(saved[name])
    for _ in range(int(saved["epoch"]), args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.barrier()  # everyone has read the old checkpoint
    saved = {"epoch": torch.tensor(args.epochs), **{name: each.state_dict() for name, each in kept.items()}}
    dcp.save(saved, checkpoint_id=place)
    say(rank, model, args.epochs)
    dist.barrier()  # nobody leaves while another is still at work
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
