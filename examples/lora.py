"""Fine-tuning by low-rank adapters over slow links: a frozen transformer stays where it is, only its adapters travel.

torchrun --standalone --nproc-per-node 4 examples/lora.py --design 'local-sgd[h=4]'

Every linear layer W of the blocks becomes W + B·A/r·α with a frozen W (Hu et al. 2021, "LoRA"). thinwire takes the
parameters that are trained, which are A and B, and leaves the others alone. The frozen model here has random weights,
the same on every rank, in place of a checkpoint that every rank would load.
"""

import argparse

import torch
import torch.distributed as dist
from tasks import Batches, Transformer, cross_entropy, evaluate, load
from torch import nn

import thinwire as tw


class LoRA(nn.Module):
    """A frozen linear layer and a trained change of low rank, which is zero at first."""

    def __init__(self, frozen: nn.Linear, rank: int, alpha: float = 16.0) -> None:
        super().__init__()
        self.frozen, self.scale = frozen, alpha / rank
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.frozen(x) + self.scale * self.up(self.down(x))
        return result


def add_adapters(model: nn.Module, rank: int) -> None:
    """Freezes a model and puts adapters on the linear layers of its blocks."""
    model.requires_grad_(False)
    blocks = model.get_submodule("layers")
    linear = [(name, each) for name, each in blocks.named_modules() if isinstance(each, nn.Linear)]
    for name, each in linear:
        parent, _, child = name.rpartition(".")
        setattr(blocks.get_submodule(parent), child, LoRA(each, rank))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--design", default="local-sgd[h=4]", help="update, local-sgd, diloco, streaming-diloco, …")
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--lr", type=float, default=4e-3)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    data = load("text")
    batches = Batches(data, rank=rank, world=world, batch=4)
    model = Transformer(args.width, args.blocks)
    add_adapters(model, args.rank)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    before = evaluate(model, data, every=16)[1] if rank == 0 else 0.0
    optimizer = tw.distribute(model, optimizer, design=args.design)  # the only difference …

    with optimizer:  # … but for this block, and its last line
        for step in range(args.steps):
            optimizer.param_groups[0]["lr"] = args.lr * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / args.steps)
            x, y = next(batches)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
        optimizer.flush()
        traffic = optimizer.traffic()
        sent = (traffic["wire_bytes_push"] + traffic["wire_bytes_pull"]) / args.steps
    if rank == 0:
        adapters = sum(parameter.numel() for parameter in trained)
        whole = sum(parameter.numel() for parameter in model.parameters())
        print(f"adapters: {adapters:,} of {whole:,} parameters")
        print(f"held-out loss {before:.3f} before, {evaluate(model, data, every=16)[1]:.3f} after, in nats a byte")
        print(
            f"{sent / 1000:.2f} kB a step with the first values, {8 * adapters / sent:.0f}x less than float32 both ways"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
