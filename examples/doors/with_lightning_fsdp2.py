"""Lightning with FSDP2, or with `--sites 2` HSDP: `configure_model` shards, and the callback compresses.

torchrun --standalone --nproc-per-node 4 examples/doors/with_lightning_fsdp2.py --folder run --epochs 2 --sites 2
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from task import BATCH, examples, net, say
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from thinwire.hooks.lightning import ThinwireCallback  # thinwire


class Classifier(LightningModule):
    """A net that is sharded among all ranks, or among those of each site; its loss and its optimizer."""

    def __init__(self, sites: int) -> None:
        super().__init__()
        self.net, self.sites = net(), sites

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        if self.sites:
            shape = (self.sites, dist.get_world_size() // self.sites)
            mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))
        for layer in (self.net[0], self.net[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoint is, or will be")
    parser.add_argument("--epochs", type=int, default=2, help="train up to this epoch")
    parser.add_argument("--sites", type=int, default=0, help="sites that hold the whole model each; 0: one mesh")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ranks = int(os.environ.get("WORLD_SIZE", "4"))

    callbacks = [ModelCheckpoint(args.folder, save_last=True)]
    callbacks.append(ThinwireCallback(codec="3lc", sparsity=1.0))  # thinwire
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
        max_epochs=args.epochs,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, last = Classifier(args.sites), args.folder / "last.ckpt"
    loader = DataLoader(examples(ranks), batch_size=BATCH)
    trainer.fit(model, loader, ckpt_path=str(last) if last.exists() else None)
    say(trainer.global_rank, model.net, args.epochs)
    dist.barrier()  # nobody leaves while another is still at work
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
