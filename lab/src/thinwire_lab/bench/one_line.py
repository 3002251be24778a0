"""One training of a bundled model with one method, under `thinwire run` or torchrun; prints its results as JSON.

    thinwire run --link 100mbit -- -m thinwire_lab.bench.one_line --model byte-transformer-1m --method one-line

A method is `none`, `auto`, `one-line` (`tw.distribute(model, optimizer)`), a codec, or a design of local updates. The
link is thin from the beginning, so the run includes a method's measurements of the link.
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
from thinwire_lab.bench.ranks import held_out
from thinwire_lab.workloads.evaluate import evaluate
from thinwire_lab.workloads.models import TEXT_MODELS
from thinwire_lab.workloads.recipe import for_workers, schedule
from thinwire_lab.workloads.recipes import recipe
from thinwire_lab.workloads.training import training

WARM_UP = 20
"""Steps without timing."""
WINDOW = 20
"""The training loss is the mean over the ranks' last 20 steps."""
EVAL_EXAMPLES = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="byte-transformer-1m")
    parser.add_argument("--method", default="one-line")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--data", default=None, help="by default python-text, digits for images")
    parser.add_argument("--seconds", type=float, default=0.0, help="time limit; 0: all steps")
    parser.add_argument("--target", type=float, default=-1.0, help="end at this training loss")
    parser.add_argument("--lr", type=float, default=None)
    parser.add_argument("--warm-up", type=float, default=None, help="share of the steps; by default the recipe's")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = args.data or ("python-text" if args.model in TEXT_MODELS else "digits")
    found = for_workers(recipe(args.model, data), ranks)
    batch = BATCHES.get(args.model, found.batch)
    warmup = found.warmup if args.warm_up is None else args.warm_up
    found = replace(found, batch=batch, lr=args.lr or found.lr, warmup=warmup, steps=args.steps)
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
        if args.target > 0 and step % 5 == 4 and _over(_sum_of_ranks(losses[-WINDOW:]).mean() <= ranks * args.target):
            break
        if args.seconds and _over(ends[-1] - ends[0] > args.seconds and step >= WARM_UP):
            break
    cpu = time.process_time() - cpu
    if local is not None:
        local.flush()
        report = str(local.report())
    elif state is not None:
        report = str(ddp.report(state))
    score = evaluate(made.model, held_out(made.dataset, EVAL_EXAMPLES))
    sums = _sum_of_ranks(losses)
    if rank == 0:
        seconds = [after - before for before, after in pairwise(ends)]
        kept = seconds[WARM_UP:] or seconds
        print(
            json.dumps(
                {
                    **{name: getattr(args, name) for name in ("model", "method", "steps", "seed")},
                    "lr": found.lr,
                    "steps_taken": len(seconds),
                    "training_loss": float(sums[-WINDOW:].mean()) / ranks,
                    "loss": score.loss,
                    "accuracy": score.accuracy,
                    "seconds_per_step": statistics.fmean(kept),
                    "median_seconds": statistics.median(kept),
                    "cpu_seconds_per_step": cpu / len(seconds),
                    "total_seconds": sum(seconds),
                    "report": report,
                    "train_losses": [round(each, 4) for each in (sums / ranks).tolist()],
                }
            ),
            flush=True,
        )
    if local is not None:
        local.close()
    # If a model in DDP outlives the group, torch joins gloo's threads with the interpreter's lock held: a deadlock.
    del model, state
    dist.destroy_process_group()


def _sum_of_ranks(losses: list[float]) -> torch.Tensor:
    sums = torch.tensor(losses)
    dist.all_reduce(sums)
    return sums


def _over(over: bool | torch.Tensor) -> bool:
    """Returns rank 0's decision to end the run; all ranks call it."""
    decision = torch.tensor([float(over)])
    dist.broadcast(decision, 0)
    return bool(decision)


if __name__ == "__main__":
    main()
