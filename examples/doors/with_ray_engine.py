"""A parameter server on Ray: Ray starts the server and the workers, and gradients travel beside it, compressed.

python examples/doors/with_ray_engine.py --folder run --epochs 2

Without the marked lines the same function trains alone, with the batches of all workers.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from task import BATCH, STEPS, examples, net, say
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import thinwire as tw  # thinwire

WORKERS = 2


def train(folder: Path, epochs: int, rank: int, servers: list[str]) -> nn.Module:
    """What every worker runs, in an actor of Ray's."""
    torch.set_num_threads(1)
    workers = WORKERS if servers else 1
    model = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.sync = optimizer.close = lambda: None  # updates are made here, and nobody else is in this training
    sampler: Any = DistributedSampler(examples(WORKERS), num_replicas=workers, rank=rank, shuffle=False)
    loader = DataLoader(examples(WORKERS), batch_size=BATCH * WORKERS // workers, sampler=sampler)

    file = folder / f"rank{rank}.pt"
    saved = torch.load(file, weights_only=True) if file.exists() else {"epoch": 0, "model": model.state_dict()}
    model.load_state_dict(saved["model"])
    state = saved.get("optimizer")
    optimizer = tw.distribute(model, optimizer, server=servers, rank=rank, workers=workers, resume=state)  # thinwire
    for _ in range(saved["epoch"], epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    optimizer.sync()
    torch.save({"epoch": epochs, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    optimizer.close()
    return model


def alone(train: Any, **options: Any) -> list[nn.Module]:
    """One process, and no server."""
    return [train(0, [])] * WORKERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints are, or will be")
    parser.add_argument("--epochs", type=int, default=2, help="train up to this epoch")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    resume = (args.folder / "rank0.pt").exists()
    run = partial(train, args.folder.resolve(), args.epochs)
    launch: Any = alone
    launch = tw.ray.launch  # thinwire
    kept = {"checkpoint_dir": args.folder, "checkpoint_every": STEPS, "resume": resume}
    for rank, model in enumerate(launch(run, workers=WORKERS, **kept)):
        say(rank, model, args.epochs)


if __name__ == "__main__":
    main()
