"""Ranks may die, come and go: torchrun starts all of them again, and they go on from the last checkpoint.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1    # ranks started again get a store of their own, without dead addresses
torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/elastic_ddp.py --folder run --steps 400

On machines that come and go, the same on each; `run` is a folder that all of them see:

torchrun --nnodes 2:4 --nproc-per-node 1 --max-restarts 10 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
    examples/elastic_ddp.py --folder run --steps 400
"""

import argparse
import json
import logging
import os
import shutil
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


class Training:
    """Everything that a step changes, on this rank."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.dataset = data("digits")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.batches = Batches(self.dataset, rank=self.rank, workers=self.world, batch=8, seed=0)
        layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.model = DistributedDataParallel(layers)
        self.state = ddp.compress(self.model, codec="3lc", sparsity=1.0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)

    def step(self) -> None:
        x, y = next(self.batches)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()

    def save(self, folder: Path) -> None:
        """Every rank's residuals in a file of its own, and all else in one; they count once all are written."""
        place = folder / f"step-{self.state.step}"
        place.mkdir(parents=True, exist_ok=True)
        torch.save(self.state.state_dict(), place / f"rank{self.rank}.pt")
        if self.rank == 0:
            shared = {
                "world_size": self.world,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "batches": json.dumps(self.batches.state_dict()),
            }
            torch.save(shared, place / "shared.pt")
        dist.barrier()
        if self.rank == 0:
            (folder / "latest.new").write_text(place.name)
            os.replace(folder / "latest.new", folder / "latest")
            for older in folder.glob("step-*"):
                if older != place:
                    shutil.rmtree(older)

    def load(self, folder: Path) -> str:
        """Goes on from the last checkpoint, whoever wrote it."""
        if not (folder / "latest").exists():
            return "begins"
        place = folder / (folder / "latest").read_text()
        shared = torch.load(place / "shared.pt", weights_only=True)
        self.model.load_state_dict(shared["model"])
        self.optimizer.load_state_dict(shared["optimizer"])
        self.batches.load_state_dict(json.loads(shared["batches"]))
        ranks = [torch.load(place / f"rank{rank}.pt", weights_only=True) for rank in range(shared["world_size"])]
        return self.state.load_state_dict(ddp.merge(ranks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoints are, or will be")
    parser.add_argument("--steps", type=int, default=400, help="train up to this step")
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    logging.getLogger("thinwire.hooks.exchange.state").setLevel(logging.ERROR)  # rank 0 prints what it returns
    training = Training()
    said = training.load(args.folder)
    dist.barrier()  # all have read it, before one writes the next
    if training.rank == 0:
        print(f"{training.world} ranks: {said}", flush=True)
    while training.state.step < args.steps:
        training.step()  # where a rank has died, an error that names it; torchrun starts all ranks again
        if training.state.step % args.every == 0 or training.state.step == args.steps:
            training.save(args.folder)
    if training.rank == 0:
        trained = training.model.module
        accuracy = evaluate(trained, training.dataset).accuracy
        print(f"step {training.state.step}: accuracy {accuracy:.2%}, weights {weights_digest(trained)}")
    dist.barrier()  # nobody leaves while another is still at work
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
