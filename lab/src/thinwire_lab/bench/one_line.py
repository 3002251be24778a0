"""One training of a bundled model with one method, under `thinwire run` or torchrun; prints what came out as JSON.

    thinwire run --link 100mbit -- -m thinwire_lab.bench.one_line --model byte-transformer-1m --method one-line

A method is `none`, `auto`, `one-line` (`tw.distribute(model, optimizer)`), a codec, or a design of local updates. The
link is thin from the beginning: what a method measures before it chooses is part of the run.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from dataclasses import replace
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.hooks import ddp
from thinwire_lab.bench.cells import BATCHES
from thinwire_lab.bench.names import hook
from thinwire_lab.workloads.evaluate import evaluate
from thinwire_lab.workloads.recipe import for_workers, schedule
from thinwire_lab.workloads.recipes import recipe
from thinwire_lab.workloads.training import training

WARM_UP = 20
"""Steps that are in no median of seconds."""

WINDOW = 20
"""A training loss is the mean of the ranks' last 20 steps."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="byte-transformer-1m")
    parser.add_argument("--data", default=None, help="by default python-text, digits for images")
    parser.add_argument("--method", default="one-line")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=0.0, help="end after so many seconds; 0: after all steps")
    parser.add_argument("--target", type=float, default=None, help="end where the training loss has come down to this")
    parser.add_argument("--lr", type=float, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-examples", type=int, default=512)
    args = parser.parse_args()

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    text = "transformer" in args.model
    data = args.data or ("python-text" if text else "digits")
    found = for_workers(recipe(args.model, data), ranks)
    batch = BATCHES.get(args.model, found.batch)
    found = replace(found, batch=batch, lr=args.lr or found.lr, steps=args.steps)
    made = training(found, data=data, rank=rank, workers=ranks, seed=args.seed)

    model, optimizer, report = made.model, made.optimizer, ""
    state, local = None, None
    if args.method == "one-line":
        local = optimizer = tw.distribute(model, optimizer, seed=args.seed)
    elif args.method in ("none", "auto") or hook(args.method).codec is not None:
        model = DistributedDataParallel(model)
        codec = hook(args.method).codec or "auto"
        state = None if args.method == "none" else ddp.compress(model, codec, seed=args.seed)
    else:
        local = optimizer = tw.distribute(model, optimizer, group=dist.group.WORLD, design=args.method, seed=args.seed)
    losses, ends, cpu = [], [time.perf_counter()], time.process_time()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule(found, step / args.steps)
        optimizer.zero_grad()
        losses.append(float(made.backward(through=model)))
        optimizer.step()
        ends.append(time.perf_counter())
        if args.target is not None and step % 5 == 4 and _mean_of_ranks(losses[-WINDOW:]) <= args.target:
            break
        if args.seconds and _over(ends[-1] - ends[0] > args.seconds and step >= WARM_UP):
            break
    cpu = time.process_time() - cpu
    if local is not None:
        local.flush()
        report = str(local.report())
    elif state is not None:
        report = str(ddp.report(state))
    rows = torch.arange(min(args.eval_examples, len(made.dataset.test_x)))
    rows = rows * len(made.dataset.test_x) // len(rows)
    tested = replace(made.dataset, test_x=made.dataset.test_x[rows], test_y=made.dataset.test_y[rows])
    score = evaluate(made.model, tested)
    means = torch.tensor(losses)
    dist.all_reduce(means)
    if rank == 0:
        seconds = [after - before for before, after in pairwise(ends)]
        kept = seconds[WARM_UP:] or seconds
        print(
            json.dumps(
                {
                    **{name: getattr(args, name) for name in ("model", "method", "steps", "seed")},
                    "lr": found.lr,
                    "steps_taken": len(seconds),
                    "training_loss": float(means[-WINDOW:].mean()) / ranks,
                    "loss": score.loss,
                    "accuracy": score.accuracy,
                    "seconds_per_step": statistics.fmean(kept),
                    "median_seconds": statistics.median(kept),
                    "cpu_seconds_per_step": cpu / len(seconds),
                    "total_seconds": sum(seconds),
                    "report": report,
                    "train_losses": [round(each, 4) for each in (means / ranks).tolist()],
                }
            ),
            flush=True,
        )
    if local is not None:
        local.close()
    # torch joins gloo's threads holding the interpreter's lock where a model in DDP outlives the group: it can hang.
    del model, state
    dist.destroy_process_group()


def _mean_of_ranks(losses: list[float]) -> float:
    mean = torch.tensor(statistics.fmean(losses))
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def _over(over: bool) -> bool:
    """Whether rank 0 ends the run; all ranks call it."""
    told = torch.tensor([float(over)])
    dist.broadcast(told, 0)
    return bool(told)


if __name__ == "__main__":
    main()
