"""Lightning: a callback compresses, and Lightning's checkpoints hold the residuals of all ranks.

torchrun --standalone --nproc-per-node 2 examples/doors/with_lightning.py --folder run --epochs 2
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from task import BATCH, examples, net, say
from torch import nn
from torch.utils.data import DataLoader

from thinwire.hooks.lightning import ThinwireCallback  # thinwire


class Classifier(LightningModule):
    """A net, its loss and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoint is, or will be")
    parser.add_argument("--epochs", type=int, default=2, help="train up to this epoch")
    parser.add_argument("--accumulate", type=int, default=1, help="batches whose gradients make one step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ranks = int(os.environ.get("WORLD_SIZE", "2"))

    callbacks = [ModelCheckpoint(args.folder, save_last=True)]
    callbacks.append(ThinwireCallback(codec="3lc", sparsity=1.0))  # thinwire
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp",
        max_epochs=args.epochs,
        accumulate_grad_batches=args.accumulate,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, last = Classifier(), args.folder / "last.ckpt"
    loader = DataLoader(examples(ranks), batch_size=BATCH)
    trainer.fit(model, loader, ckpt_path=str(last) if last.exists() else None)
    say(trainer.global_rank, model.net, args.epochs)
    dist.barrier()  # nobody leaves while another is still at work
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
