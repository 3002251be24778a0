"""Accelerate: `prepare` wraps the model, `save_state` keeps the residuals of all ranks with everything else.

torchrun --standalone --nproc-per-node 2 examples/doors/with_accelerate.py --folder run --epochs 2
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from task import BATCH, examples, net, say
from torch import nn
from torch.utils.data import DataLoader

from thinwire.hooks import ddp  # thinwire


class Progress:
    """How far the training is."""

    def __init__(self) -> None:
        self.epochs = 0

    def state_dict(self) -> dict[str, int]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epochs = state["epochs"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoint is, or will be")
    parser.add_argument("--epochs", type=int, default=2, help="train up to this epoch")
    args = parser.parse_args()
    torch.set_num_threads(1)

    accelerator = Accelerator(cpu=True)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(examples(accelerator.num_processes), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    state = ddp.compress(model, codec="3lc", sparsity=1.0)  # thinwire
    accelerator.register_for_checkpointing(ddp.AllRanks(state))  # thinwire

    if args.folder.exists():
        accelerator.load_state(str(args.folder))
    while progress.epochs < args.epochs:
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
        progress.epochs += 1
    accelerator.wait_for_everyone()  # everyone has read the old checkpoint
    accelerator.save_state(str(args.folder))
    say(accelerator.process_index, accelerator.unwrap_model(model), args.epochs)
    accelerator.wait_for_everyone()  # nobody leaves while another is still at work
    accelerator.end_training()


if __name__ == "__main__":
    main()
