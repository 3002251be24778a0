"""The script of `test_failing.py` on two ranks: rank 0 fails in its loop while rank 1, connected, is silent."""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

import thinwire as tw
from tests.hooks.local_runs import adamw, inner_step, mlp
from thinwire.hooks import ending

torch.set_num_threads(1)
ending.FAILED_S = 1.0


class Mine(Exception):
    """Rank 0's error."""


def stopped(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def main() -> None:
    dist.init_process_group("gloo")
    rank, processes = dist.get_rank(), [0, 0]
    dist.all_gather_object(processes, os.getpid())
    for freezes in (False, True):
        began, told = time.monotonic(), ""
        try:
            model = mlp(rank)
            with tw.distribute(model, adamw(model), group=dist.group.WORLD, design="local-sgd[h=2]") as opt:
                for step in range(4):
                    inner_step(model, opt, rank, step)
                opt.sync()
                dist.barrier()  # both have had the other one's answers
                if rank == 0:
                    while freezes and not stopped(processes[1]):
                        time.sleep(0.05)
                    began = time.monotonic()
                    raise Mine
                if freezes:
                    os.kill(os.getpid(), signal.SIGSTOP)
                else:
                    dist.barrier()
                inner_step(model, opt, rank, 4)
                inner_step(model, opt, rank, 5)
                opt.sync()
                told = "trains on alone"
        except Exception as error:
            told = f"{type(error).__name__} after {time.monotonic() - began:.0f} s"
        if rank == 0 and freezes:
            os.kill(processes[1], signal.SIGCONT)
        elif rank == 0:
            dist.barrier()
        texts = ["", ""]
        dist.all_gather_object(texts, told)
        if rank == 0:
            print(f"{'frozen' if freezes else 'busy'}: {texts[0]}, {texts[1].partition(' after')[0]}", flush=True)
    dist.barrier()  # gloo's thread lets go of what was gathered, which it could not while the process ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
