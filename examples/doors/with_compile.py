"""torch.compile around DistributedDataParallel; `--inside` compiles the model before it is wrapped.

torchrun --standalone --nproc-per-node 2 examples/doors/with_compile.py --folder run --epochs 2
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from task import BATCH, examples, net, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from thinwire.hooks import ddp  # thinwire


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoint is, or will be")
    parser.add_argument("--epochs", type=int, default=2, help="train up to this epoch")
    parser.add_argument("--inside", action="store_true", help="DDP of the compiled model")
    parser.add_argument("--backend", default="inductor", help="of torch.compile; aot_eager needs no C++ compiler")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    plain = net()
    if args.inside:
        model = DistributedDataParallel(torch.compile(plain, backend=args.backend))
    else:
        model = torch.compile(DistributedDataParallel(plain), backend=args.backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kept = {"model": plain, "optimizer": optimizer}
    kept["thinwire"] = ddp.compress(model, codec="3lc", sparsity=1.0)  # thinwire
    sampler = DistributedSampler(examples(ranks), shuffle=False)
    loader = DataLoader(examples(ranks), batch_size=BATCH, sampler=sampler)

    place, epoch = args.folder / f"rank{rank}.pt", 0
    if place.exists():
        saved = torch.load(place, weights_only=True)
        epoch = saved.pop("epoch")
        for name, state in saved.items():
            kept[name].load_state_dict(state)
    for _ in range(epoch, args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    args.folder.mkdir(parents=True, exist_ok=True)
    torch.save({"epoch": args.epochs, **{name: each.state_dict() for name, each in kept.items()}}, place)
    say(rank, plain, args.epochs)
    dist.barrier()  # nobody leaves while another is still at work
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
