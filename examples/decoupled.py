"""Learners of different speeds that never wait for each other, on this machine: a server and three learners.

python examples/decoupled.py --tokens 200000

The last learner pauses after every step, as a slower GPU would. Kill any learner meanwhile (its process id is printed):
the others go on. On machines of your own start `thinwire server --listen HOST:7070 --min-workers 1` on one, and on each
machine with a GPU `python examples/decoupled.py --server grpc://HOST:7070 --rank RANK`.
"""

import argparse
import socket
import subprocess
import sys
import time

import torch
from tasks import Batches, Transformer, cross_entropy, evaluate, load

import thinwire as tw


def learn(server: str, rank: int, learners: int, design: str, tokens: float, pause_s: float) -> None:
    """Trains one learner until all learners together have taken so many tokens."""
    torch.set_num_threads(1)
    data = load("text")
    batches = Batches(data, rank=rank, world=learners, batch=4)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer = tw.distribute(model, optimizer, server=server, rank=rank, workers=learners, design=design)
    with optimizer:
        while optimizer.examples_merged < tokens:
            x, y = next(batches)
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step(examples=x.numel())  # shards weigh contributions by them
            time.sleep(pause_s)
            if optimizer.steps_done % 50 == 0:
                print(f"learner {rank}, step {optimizer.steps_done}: {loss.item():.3f} nats a byte", flush=True)
        optimizer.flush()  # contributes what is left; every learner then has the same parameters
    print(f"learner {rank}: {optimizer.steps_done} steps; held out {evaluate(model, data)[1]:.3f} nats", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", help="grpc://host:port of a server that runs; without it, one is started here")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--learners", type=int, default=3)
    parser.add_argument("--design", default="decoupled[h=24,quorum=2,grace=1.0]")
    parser.add_argument("--tokens", type=float, default=200_000, help="that all learners together take")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after every step")
    args = parser.parse_args()
    if args.server:
        learn(args.server, args.rank, args.learners, args.design, args.tokens, args.pause)
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    server = [sys.executable, "-m", "thinwire", "server", "--listen", address, "--min-workers", "1"]
    started = [subprocess.Popen(server)]
    try:
        for rank in range(args.learners):
            pause = args.pause + 0.2 * (rank == args.learners - 1)
            command = [sys.executable, __file__, "--server", f"grpc://{address}", "--rank", str(rank)]
            command += ["--learners", str(args.learners), "--design", args.design, "--tokens", str(args.tokens)]
            started.append(subprocess.Popen([*command, "--pause", str(pause)]))
            print(f"learner {rank} is process {started[-1].pid}", flush=True)
        for process in started[1:]:
            process.wait()
    finally:
        for process in started:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
