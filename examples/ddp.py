"""A DistributedDataParallel script, with one line more than usual.

    torchrun --standalone --nproc-per-node 2 examples/ddp.py
    torchrun --standalone --nproc-per-node 4 examples/ddp.py --data fashion-mnist --steps 500

Delete the line with `ddp.compress`, and those that use `state`, and it is plain PyTorch.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import ThinwireError
from thinwire.hooks import ddp
from thinwire_lab.workloads.batches import Batches
from thinwire_lab.workloads.data import data
from thinwire_lab.workloads.evaluate import evaluate


def network(in_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A small convolutional network."""
    channels, height, width = in_shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits", help="digits, which ship with the package, fashion-mnist or mnist")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16, help="examples per rank and step")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and the order of the data")
    args = parser.parse_args()

    try:
        dataset = data(args.data)
    except ThinwireError as error:  # says what to do, before the ranks wait for each other
        raise SystemExit(f"error: {error}") from None
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    batches = Batches(dataset, rank=rank, workers=world, batch=args.batch, seed=args.seed)

    model = DistributedDataParallel(network(dataset.in_shape, dataset.num_classes))
    state = ddp.compress(model, codec="3lc", sparsity=1.0, entropy="zstd")
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    # Over the last fifth of the steps the rate falls to 0: what residuals hold is sent before the end.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 5 * (1 - step / args.steps)))

    began = time.perf_counter()
    for step, (x, y) in zip(range(args.steps), batches, strict=False):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        if rank == 0 and (step + 1) % 100 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    seconds = time.perf_counter() - began

    if rank == 0:
        score = evaluate(model.module, dataset)
        print(f"{args.steps} steps in {seconds:.1f} s, test accuracy {score.accuracy:.2%}")
        print(ddp.report(state))
    dist.barrier()  # nobody leaves while another is still at work
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
