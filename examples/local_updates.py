"""A transformer trained with AdamW over slow links: what local steps changed travels, in 2 bits a value.

torchrun --standalone --nproc-per-node 4 examples/local_updates.py --design 'local-sgd[h=4]'

The three lines that differ from training on one machine are marked. There is no server process: every rank averages a
share of the model. To train with servers instead, give `server=["grpc://…"], rank=…, workers=…` in place of `group`.
"""

import argparse

import torch
import torch.distributed as dist
from tasks import Batches, Transformer, cross_entropy, evaluate, load

import thinwire as tw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--design", default="local-sgd[h=4]", help="update, local-sgd, diloco, streaming-diloco, …")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--lr", type=float, default=4e-3)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    data = load("text")
    batches = Batches(data, rank=rank, world=world, batch=4)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer = tw.distribute(model, optimizer, design=args.design)  # 1

    with optimizer:  # 2
        for step in range(args.steps):
            optimizer.param_groups[0]["lr"] = args.lr * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / args.steps)
            x, y = next(batches)
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if rank == 0 and step % 20 == 19:
                print(f"step {step + 1}: {loss.item():.3f} nats a byte", flush=True)
        optimizer.flush()  # 3: what local steps have changed since the last exchange
        report = optimizer.report()
        traffic = optimizer.traffic()
        sent = (traffic["wire_bytes_push"] + traffic["wire_bytes_pull"]) / args.steps
    if rank == 0:
        plain = 2 * 4 * sum(parameter.numel() for parameter in model.parameters())
        print(report)
        print(f"held-out loss {evaluate(model, data)[1]:.3f} nats a byte")
        print(f"{sent / 1000:.1f} kB a step with the first values, {plain / sent:.0f}x less than float32 both ways")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
