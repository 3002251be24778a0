"""What `test_group_resume` runs on two ranks: trainings that go on from what they saved, and what is refused."""

import io
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import thinwire as tw
from tests.hooks.local_runs import inner_optimizer, inner_step, sgd, values, wide
from thinwire.errors import ConfigError, ProtocolError, SessionLostError
from thinwire.hooks.distribute import DistributedOptimizer
from thinwire.hooks.resuming import KeptSteps, load_agreed
from thinwire.telemetry import StepRecord

TOTAL = 14


def parameters(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def saved(model: nn.Module, opt: DistributedOptimizer) -> Any:
    """As a script keeps it, in a file that torch reads without pickle."""
    saves: list[tuple[str, Any]] = [("model", model), ("opt", opt)]  # either waits for the last exchange by itself
    file = io.BytesIO()
    torch.save({name: each.state_dict() for name, each in (saves if opt.rank else reversed(saves))}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def run(design: str, begin: int, at: int | None = None, checkpoint: Any = None) -> tuple[torch.Tensor, Any]:
    """Returns the parameters at the end, and what was saved before step `at`."""
    rank, kept = dist.get_rank(), None
    model = wide(rank)
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
    resume = None if checkpoint is None else checkpoint["opt"]
    inner = inner_optimizer(design)(model)
    with tw.distribute(model, inner, group=dist.group.WORLD, design=design, resume=resume) as opt:
        for step in range(begin, TOTAL):
            if step == at:
                if rank == 0:
                    time.sleep(0.3)  # the other rank has pushed to this one's shard meanwhile, where H is 1
                kept = saved(model, opt)
            inner_step(model, opt, rank, step)
        opt.flush()
        # Statistics of a batch norm are worker 0's from time to time, unless updates are exchanged.
        return (parameters if design == "3lc" else values)(model), kept


def refused(design: str, checkpoint: Any) -> str:
    try:
        run(design, 0, checkpoint=checkpoint)
    except (ConfigError, ProtocolError) as error:
        return str(error)
    return "nothing was refused"


def tell(text: str) -> None:
    """Rank 0 prints what all ranks have to say."""
    texts: list[Any] = [None, None]
    dist.all_gather_object(texts, text)
    if dist.get_rank() == 0:
        for rank, each in enumerate(texts):
            print(f"rank {rank}: {each}", flush=True)


def warned(design: str) -> str:
    """Returns what is said of a state between the exchanges of two fragments."""
    rank, model = dist.get_rank(), wide(dist.get_rank())
    with tw.distribute(model, inner_optimizer(design)(model), group=dist.group.WORLD, design=design) as opt:
        for step in range(3):
            inner_step(model, opt, rank, step)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            opt.state_dict()
        opt.flush()
    return " ".join(str(each.message) for each in found)


def moved(design: str) -> tuple[float, float, float, set[int]]:
    """Returns bytes sent and received by this rank in some steps; and what a ring of two sends, and receives; and of
    how many ranks that serve each other its records are."""
    rank, model, served = dist.get_rank(), wide(dist.get_rank()), Served()
    inner = inner_optimizer(design)(model)
    with tw.distribute(model, inner, group=dist.group.WORLD, design=design, metrics=[served]) as opt:
        inner_step(model, opt, rank, 0)
        opt.sync()
        dist.barrier()
        before = opt.traffic()
        for step in range(1, 21):
            inner_step(model, opt, rank, step)
        opt.sync()
        after = opt.traffic()
    sent, received = (after[name] - before[name] for name in ("wire_bytes_push", "wire_bytes_pull"))
    return sent, received, 20 * 4.0 * sum(parameter.numel() for parameter in model.parameters()), served.ranks


class Served:
    """A metrics writer that keeps of how many ranks its records are."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()

    def record(self, record: StepRecord) -> None:
        self.ranks.add(record.serving_ranks)

    def close(self) -> None:
        pass


def kept_steps(design: str, lost_at: int) -> tuple[torch.Tensor, list[int], list[int]]:
    """Trains, loses all shards at a step, and goes on with all others from what is kept in memory.

    Returns:
        The parameters at the end; the step that each joining went on from; and the exchanges kept at the end.
    """
    rank, model = dist.get_rank(), wide(dist.get_rank())
    kept = KeptSteps(model)
    began: list[int] = []
    while len(began) < 3:
        inner = inner_optimizer(design)(model)
        try:
            with tw.distribute(model, inner, group=dist.group.WORLD, design=design, resume=kept) as opt:
                began.append(opt.steps_done)
                for step in range(opt.steps_done, TOTAL):
                    inner_step(model, opt, rank, step)
                    if (step + 1) % 3 == 0 and not (rank and len(began) == 1 and step > lost_at - 4):
                        kept.add(opt)
                    if step == lost_at and len(began) == 1:
                        raise SessionLostError("as where the link was away for longer than reconnect_s")
                opt.flush()
                break
        except SessionLostError:
            pass
    return (parameters if design == "3lc" else values)(model), began, sorted(kept.steps() or ())


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    kept: Any = None
    for design, at in (
        ("update", 7),
        ("diloco[h=3]", 6),
        ("streaming-diloco[h=6,delay=2]", 12),
        ("3lc", 7),
    ):
        whole, kept = run(design, 0, at)
        again, _ = run(design, at, checkpoint=kept)
        tell(f"{design} {'equal' if torch.equal(whole, again) else 'differs'}")
    whole, early = run("local-sgd[h=4]", 0, 5)
    again, kept = run("local-sgd[h=4]", 5, 9, early)
    tell(f"local-sgd {'equal' if torch.equal(whole, again) else 'differs'}")
    again, _ = run("local-sgd[h=4]", 9, checkpoint=kept)
    tell(f"twice {'equal' if torch.equal(whole, again) else 'differs'}")

    for design in ("update", "local-sgd[h=2]", "3lc"):
        whole, _ = run(design, 0)
        again, began, stay = kept_steps(design, lost_at=10)
        # One rank kept the state after step 9, and the other none newer than that after step 6.
        tell(f"kept {'equal' if torch.equal(whole, again) else 'differs'} {began} {len(stay)}")
    kept_alone, world = KeptSteps(wide(rank)), dist.group.WORLD
    assert world is not None
    if rank == 0:
        kept_alone.steps()  # it has begun before
    try:
        load_agreed(kept_alone, world)
        tell("begins")
    except ConfigError as error:
        tell(str(error))
    kept_alone._states, kept_alone._takes_part = {7 + rank: kept_alone._states[0]}, True
    try:
        load_agreed(kept_alone, world)
        tell("nothing was refused")
    except ConfigError as error:
        tell(str(error))

    for first in (kept, None):
        try:
            load_agreed(kept_alone if rank else first, world)
            tell("nothing was refused")
        except ConfigError as error:
            tell(str(error))

    everybodys: list[Any] = [None, None]
    dist.all_gather_object(everybodys, kept)
    tell(f"one for all: {refused('local-sgd[h=4]', everybodys[0])}")
    tell(f"unlike: {refused('local-sgd[h=4]', early if rank else kept)}")
    tell(f"one begins: {refused('local-sgd[h=4]', None if rank else kept)}")
    tell(f"differ: {refused(f'local-sgd[h={2 + rank}]', None)}")
    tell(f"plain: {refused('local-sgd[h=4]', {**kept, 'opt': sgd(wide(rank)).state_dict()})}")
    without = {**kept, "opt": {key: value for key, value in kept["opt"].items() if key != "shard"}}
    tell(f"without: {refused('local-sgd[h=4]', without)}")
    shard = kept["opt"]["shard"]
    for name, damaged in (
        ("tensors", {**shard, "tensors": {}}),
        ("step", {key: value for key, value in shard.items() if key != "step"}),
        ("state", {**shard, "state": {"plan": 3}}),
        ("kind", "a shard"),
    ):
        cut = {**kept, "opt": {**kept["opt"], "shard": damaged if rank else shard}}
        tell(f"{name}: {refused('local-sgd[h=4]', cut)}")

    model = wide(rank)
    model.load_state_dict(kept["model"])
    inner = inner_optimizer("local-sgd")(model)
    with tw.distribute(model, inner, group=dist.group.WORLD, design="local-sgd[h=4]", resume=kept["opt"]) as opt:
        try:
            opt.load_state_dict(kept["opt"])
            tell("nothing was refused")
        except ConfigError as error:
            tell(str(error))
    tell(f"early: {warned('streaming-diloco[h=6,delay=2]')}")
    sent, received, least, serving = moved("update[codec=fp32,codec_down=fp32,small=fp32]")
    tell(f"moved: {sent >= least and received >= least and sent + received < 2.5 * least}, serving {serving}")

    wrapped: Any = nn.parallel.DistributedDataParallel(wide(rank))
    hooked: Any = nn.parallel.DistributedDataParallel(wide(rank))
    hooked.register_comm_hook(None, allreduce_hook)
    asked: list[tuple[Any, dict[str, Any]]] = [
        (wrapped, {"codec": "3lc"}),
        (torch.compile(wrapped, backend="eager"), {"design": "update"}),
        (hooked, {"design": "update"}),
    ]
    for model, options in asked:
        try:
            tw.distribute(model, sgd(model), group=dist.group.WORLD, **options)
            tell("nothing was refused")
        except ConfigError as error:
            tell(str(error))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
