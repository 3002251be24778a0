"""Stop and go on: every rank saves its own residuals, and another number of ranks may take over.

torchrun --standalone --nproc-per-node 2 examples/ddp_resume.py --folder run --steps 100
torchrun --standalone --nproc-per-node 2 examples/ddp_resume.py --folder run --steps 200   # as if never stopped
torchrun --standalone --nproc-per-node 3 examples/ddp_resume.py --folder run --steps 300   # with all residuals
"""

import argparse
import json
import logging
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.hooks import ddp
from thinwire_lab.jobs.training_loop import weights_digest
from thinwire_lab.workloads.batches import Batches
from thinwire_lab.workloads.data import data
from thinwire_lab.workloads.evaluate import evaluate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoint is, or will be")
    parser.add_argument("--steps", type=int, default=100, help="train up to this step")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dataset = data("digits")
    batches = Batches(dataset, rank=rank, workers=world, batch=8, seed=0)

    model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    state = ddp.compress(model, codec="3lc", sparsity=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    shared = args.folder / "shared.pt"
    if shared.exists():
        saved = torch.load(shared, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        batches.load_state_dict(json.loads(saved["batches"]))
        parts = [torch.load(args.folder / f"rank{r}.pt", weights_only=True) for r in range(saved["world_size"])]
        logging.getLogger("thinwire.hooks.exchange.state").setLevel(logging.ERROR)  # every rank would log it, too
        said = state.load_state_dict(ddp.merge(parts))
        if rank == 0:
            print(said)

    for _ in range(state.step, args.steps):
        x, y = next(batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    args.folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()  # everyone has read the old checkpoint
    torch.save(state.state_dict(), args.folder / f"rank{rank}.pt")
    if rank == 0:
        saved = {
            "world_size": world,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "batches": json.dumps(batches.state_dict()),
        }
        torch.save(saved, shared)
        accuracy = evaluate(model.module, dataset).accuracy
        print(f"step {state.step} on {world} ranks: accuracy {accuracy:.2%}, weights {weights_digest(model.module)}")
    dist.barrier()  # nobody leaves while another is still at work
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
