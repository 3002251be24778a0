"""PEFT: a frozen model with LoRA adapters in DistributedDataParallel; the adapters alone travel.

torchrun --standalone --nproc-per-node 2 examples/doors/with_peft.py --folder run --epochs 2
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from task import BATCH, examples, net, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from thinwire.hooks import ddp  # thinwire


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoint is, or will be")
    parser.add_argument("--epochs", type=int, default=2, help="train up to this epoch")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    adapted = get_peft_model(net(), LoraConfig(r=8, target_modules=["0", "2", "4"], init_lora_weights=True))
    model = DistributedDataParallel(adapted)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.3, momentum=0.9)
    kept = {"optimizer": optimizer}
    kept["thinwire"] = ddp.compress(model, codec="3lc", sparsity=1.0, min_numel=32)  # thinwire
    sampler = DistributedSampler(examples(ranks), shuffle=False)
    loader = DataLoader(examples(ranks), batch_size=BATCH, sampler=sampler)

    place, epoch = args.folder / f"rank{rank}.pt", 0
    if place.exists():
        saved = torch.load(place, weights_only=True)
        epoch = saved["epoch"]
        set_peft_model_state_dict(adapted, saved["adapters"])
        for name, each in kept.items():
            each.load_state_dict(saved[name])
    for _ in range(epoch, args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    args.folder.mkdir(parents=True, exist_ok=True)
    saved = {"epoch": args.epochs, "adapters": get_peft_model_state_dict(adapted)}
    torch.save({**saved, **{name: each.state_dict() for name, each in kept.items()}}, place)
    say(rank, adapted, args.epochs)
    dist.barrier()  # nobody leaves while another is still at work
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
