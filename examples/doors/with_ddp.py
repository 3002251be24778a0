"""DistributedDataParallel in a loop of one's own; started again, it goes on from the last epoch.

torchrun --standalone --nproc-per-node 2 examples/doors/with_ddp.py --folder run --epochs 2

With `--max-restarts 1`, `--die-after 1` shows what torchrun does when a rank dies: it starts all again.
"""

import argparse
import os
import signal
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
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints are, or will be")
    parser.add_argument("--epochs", type=int, default=2, help="train up to this epoch")
    parser.add_argument("--die-after", type=int, default=0, help="the last rank is killed after this epoch, once")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kept = {"model": model, "optimizer": optimizer}
    kept["thinwire"] = ddp.compress(model, codec="3lc", sparsity=1.0)  # thinwire
    sampler = DistributedSampler(examples(ranks), shuffle=False)
    loader = DataLoader(examples(ranks), batch_size=BATCH, sampler=sampler)

    done = [epoch for epoch in range(args.epochs) if (args.folder / f"epoch-{epoch}" / "complete").exists()]
    if done:
        saved = torch.load(args.folder / f"epoch-{done[-1]}" / f"rank{rank}.pt", weights_only=True)
        for name, each in kept.items():
            each.load_state_dict(saved[name])
    for epoch in range(len(done), args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        place = args.folder / f"epoch-{epoch}"
        place.mkdir(parents=True, exist_ok=True)
        torch.save({name: each.state_dict() for name, each in kept.items()}, place / f"rank{rank}.pt")
        dist.barrier()
        (place / "complete").touch()  # all ranks have written theirs
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if epoch + 1 == args.die_after and rank == ranks - 1 and not restarted:
            os.kill(os.getpid(), signal.SIGKILL)
    say(rank, model.module, args.epochs)
    dist.barrier()  # nobody leaves while another is still at work
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
