"""Ray Train: Ray starts the workers and `prepare_model` wraps; every rank's residuals go into Ray's checkpoints.

python examples/doors/with_ray.py --folder run --epochs 2
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from task import BATCH, examples, net, say
from torch import nn
from torch.utils.data import DataLoader

from thinwire.hooks import ddp  # thinwire


def train(config: dict[str, Any]) -> None:
    """What every worker runs."""
    torch.set_num_threads(1)
    context = ray.train.get_context()
    rank, ranks = context.get_world_rank(), context.get_world_size()
    model = ray.train.torch.prepare_model(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = ray.train.torch.prepare_data_loader(DataLoader(examples(ranks), batch_size=BATCH))
    kept = {"model": model, "optimizer": optimizer}
    kept["thinwire"] = ddp.compress(model, codec="3lc", sparsity=1.0)  # thinwire

    epoch = 0
    if config["checkpoint"] is not None:
        with Checkpoint(config["checkpoint"]).as_directory() as folder:
            saved = torch.load(Path(folder) / f"rank{rank}.pt", weights_only=True)
        epoch = saved.pop("epoch")
        for name, state in saved.items():
            kept[name].load_state_dict(state)
    for _ in range(epoch, config["epochs"]):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        state = {"epoch": config["epochs"], **{name: each.state_dict() for name, each in kept.items()}}
        torch.save(state, Path(folder) / f"rank{rank}.pt")  # Ray puts the files of all ranks into one checkpoint
        ray.train.report({"epoch": config["epochs"]}, checkpoint=Checkpoint.from_directory(folder))
    say(rank, model.module, config["epochs"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints are, or will be")
    parser.add_argument("--epochs", type=int, default=2, help="train up to this epoch")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    latest = args.folder / "latest"
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": args.epochs, "checkpoint": latest.read_text() if latest.exists() else None},
        scaling_config=ScalingConfig(num_workers=args.workers),
        run_config=RunConfig(storage_path=str(args.folder.resolve()), name=f"to-epoch-{args.epochs}"),
    )
    ray.init(num_cpus=args.workers + 1, include_dashboard=False)
    latest.write_text(trainer.fit().checkpoint.path)


if __name__ == "__main__":
    main()
