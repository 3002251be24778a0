"""Hugging Face's Trainer: a callback compresses, and puts the residuals into the Trainer's own checkpoints.

torchrun --standalone --nproc-per-node 2 examples/doors/with_trainer.py --folder run --epochs 2
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from task import BATCH, examples, net, say
from torch import nn
from torch.utils.data import TensorDataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from thinwire.hooks.transformers import ThinwireCallback  # thinwire


class WithLoss(nn.Module):
    """A net that returns its loss, as the Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows(data: TensorDataset) -> list[dict[str, torch.Tensor]]:
    return [{"x": x, "labels": y} for x, y in data]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints are, or will be")
    parser.add_argument("--epochs", type=int, default=2, help="train up to this epoch")
    parser.add_argument("--accumulate", type=int, default=1, help="batches whose gradients make one step")
    args = parser.parse_args()
    torch.set_num_threads(1)

    settings = TrainingArguments(
        output_dir=str(args.folder),
        num_train_epochs=args.epochs,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        save_strategy="epoch",
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(WithLoss(), settings, train_dataset=rows(examples(settings.world_size)))
    trainer.add_callback(ThinwireCallback(trainer, codec="3lc", sparsity=1.0))  # thinwire
    last = get_last_checkpoint(str(args.folder)) if args.folder.exists() else None
    trainer.train(resume_from_checkpoint=last)
    say(settings.process_index, trainer.model.net, args.epochs)
    dist.barrier()  # nobody leaves while another is still at work
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
