"""One line that suits most trainings: thinwire measures the step and the link, and chooses what the ranks exchange.

    torchrun --standalone --nproc-per-node 4 examples/one_line.py --optimizer adamw
    torchrun --standalone --nproc-per-node 4 examples/one_line.py --optimizer sgd --steps 500

Without the marked line every rank trains by itself.
"""

import argparse
import time

import torch
import torch.distributed as dist
from tasks import Batches, evaluate, load
from torch import nn

import thinwire as tw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="adamw")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--link", default="none", help="as in 20mbit: says how to make the link between ranks so slow")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0 and args.link != "none":
        print(
            "This script trains over the link that there is. To slow down loopback, for all programs, as root:\n"
            f"  tc qdisc replace dev lo root tbf rate {args.link} burst 64kb latency 200ms\n"
            "and afterwards: tc qdisc del dev lo root",
            flush=True,
        )
    torch.set_num_threads(1)
    data = load("digits")
    batches = Batches(data, rank=rank, world=world, batch=16)
    torch.manual_seed(0)
    pixels = data.train_x[0].numel()
    model = nn.Sequential(nn.Flatten(), nn.Linear(pixels, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
    model.append(nn.Linear(512, 10))
    if args.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    optimizer = tw.distribute(model, optimizer)  # the one line

    began = time.perf_counter()
    for step, (x, y) in zip(range(args.steps), batches, strict=False):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if rank == 0 and (step + 1) % 100 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    optimizer.flush()  # all ranks now have the same weights
    seconds = time.perf_counter() - began

    if rank == 0:
        nbytes = 2 * (world - 1) / world * 4 * sum(each.numel() for each in model.parameters())
        print(f"{args.steps} steps in {seconds:.1f} s, test accuracy {evaluate(model, data)[0]:.2%}")
        print(optimizer.report())
        print(f"a plain all-reduce sends {nbytes / 1e3:.1f} kB a step and rank")
    optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
