"""`tw.distribute(model, optimizer)` under torchrun: the choice for each optimizer and link, and its training."""

from __future__ import annotations

import copy
import io
import itertools
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.hooks.ddp_ranks import refusal, run_cases, run_script
from tests.hooks.frameworks.test_frameworks import stub
from tests.hooks.local_runs import adamw, batch, mlp, sgd, values, weights
from thinwire.hooks.auto_optimizer import AutoOptimizer
from thinwire.hooks.resuming import KeptSteps

STEPS = 11
LINKS = {"plain all-reduce": 1e12, "local-sgd[h=4]": 2.2e6, "local-sgd[h=16]": 1.7e5}
"""Bits per second at which each is chosen if a step of `mlp` takes 10 ms."""

DECIDED = ("codec_down", "consistency", "placement", "reduce", "overlap", "compression", "sparsity")


@contextmanager
def measured(link_bps: float, step_s: float = 0.01) -> Iterator[mock.Mock]:
    """Sets the ranks' measurements; yields the number of measurements of the link."""
    with (
        mock.patch("thinwire.runtime.peers.measure_link", return_value=link_bps) as link,
        mock.patch("thinwire.hooks.auto_choice.StepClock.step_s", step_s),
    ):
        yield link


def step(model: nn.Module, optimizer: Any, rank: int, number: int, *, passes: int = 1) -> None:
    optimizer.zero_grad()
    for each in range(passes):
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = each == passes - 1  # as nanoGPT accumulates gradients
        x, y = batch(rank, number + 1000 * each)
        with nullcontext() if each == passes - 1 else optimizer.no_sync():
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def made(rank: int, wrapped: bool) -> tuple[nn.Module, Any]:
    """The module that the script calls, and the module inside it; other weights on every rank."""
    module = mlp(rank)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.01 * rank)
    return DistributedDataParallel(module) if wrapped else module, module


def train(rank: int, wrapped: bool, link: str, stop: int = 0, passes: int = 1, make: Any = adamw) -> dict[str, Any]:
    """A training; if it stops after some steps, each rank resumes from its own state."""
    saved: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for begin, end in ((0, stop), (stop, STEPS)) if stop else ((0, STEPS),):
        model, module = made(rank, wrapped)
        if begin:
            module.load_state_dict(saved["model"])
            make(module).load_state_dict(saved["optimizer"])  # as a framework does before a training
        inner = make(module)
        with measured(LINKS[link]) as probe, warnings.catch_warnings():
            warnings.simplefilter("error")
            opt: Any = tw.distribute(model, inner, resume=saved.get("optimizer"))
            schedulers = [torch.optim.lr_scheduler.StepLR(each, 5) for each in (opt, inner)]
            with opt:
                for number in range(begin, end):
                    step(model, opt, rank, number, passes=passes)
                    found.setdefault("equal", []).append(spread(module))
                file = io.BytesIO()
                torch.save({"model": module.state_dict(), "optimizer": opt.state_dict()}, file)
                saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
                if end == STEPS:
                    for each in schedulers:
                        each.step()
                    opt.flush()
                    with opt.shared_weights():
                        found |= {"shared": values(module)}
                    found |= {"chosen": opt.chosen, "report": str(opt.report()), "steps": opt.steps_done}
                    found |= {"exchange": type(opt.exchange).__name__, "probes": probe.call_count}
                    found |= {"rates": opt.param_groups[0]["lr"] == inner.param_groups[0]["lr"]}
                    found |= {"moments": inner.state[next(module.parameters())]["exp_avg"].clone()}
        if wrapped and end == STEPS:
            model(batch(rank, 0)[0]).sum().backward()
    return {**found, "end": weights(module), "grad": [each.grad for each in module.parameters()]}


def spread(module: nn.Module) -> float:
    own = weights(module)
    most, least = own.clone(), own.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return float((most - least).max())


def train_sgd(rank: int, wrapped: bool) -> dict[str, Any]:
    model, module = made(rank, wrapped)
    inner = sgd(module)
    opt: Any = tw.distribute(model, inner, group=dist.group.WORLD, design="auto", seed=3, min_numel=64)
    found: dict[str, Any] = {"first": opt.chosen, "kind": type(opt.exchange).__name__}
    with opt:
        for number in range(6):
            step(model, opt, rank, number, passes=2)
        found |= {"spread": spread(module), "report": str(opt.report())}
        if not wrapped:
            module[0](batch(rank, 0)[0]).sum().backward()
            found["part"] = refusal(opt.step)
            opt.zero_grad()
        with opt.no_sync():
            model(batch(rank, 7)[0]).sum().backward()
        saved = copy.deepcopy(opt.state_dict())
        if rank == 0 and not wrapped:  # alone
            with torch.no_grad():
                model.eval()(batch(0, 0)[0])
                model.train()
            copied = copy.deepcopy(model)
            copied(batch(0, 0)[0]).sum().backward()
    model, module = made(rank, wrapped)
    with tw.distribute(model, sgd(module), min_numel=64, seed=3, resume=saved) as opt:
        found |= {"resumed": opt.steps_done, "exchanged": opt.exchange.step}
        step(model, opt, rank, 8)
        found["again"] = spread(module)
    return found


def scaled(rank: int) -> tuple[str, int, float]:
    """A GradScaler, and an overflow on one rank alone while steps are measured."""
    model, _ = made(rank, False)
    inner = adamw(model)
    with measured(1e12), cast("AutoOptimizer", tw.distribute(model, inner)) as opt:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for number in range(8):
            x, y = batch(rank, number)
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            scaled: Any = scaler.scale(loss * (float("inf") if (rank, number) == (1, 1) else 1.0))
            scaled.backward()
            scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
        opt.flush()
        return opt.chosen, opt.steps_done, spread(model)


def again(rank: int) -> list[tuple[str, int, float]]:
    """One static wrapper in two trainings, the first of which disables its all-reduce; then resumes from kept steps."""
    model: Any = DistributedDataParallel(mlp(rank), static_graph=True)
    found: list[tuple[str, int, float]] = []
    for link in ("local-sgd[h=4]", "plain all-reduce"):
        kept = KeptSteps(model.module)
        for begins in (0, 7):
            with measured(LINKS[link]), tw.distribute(model, adamw(model), resume=kept) as opt:
                assert opt.steps_done == begins
                for number in range(begins, 9):
                    step(model, opt, rank, number)
                    if opt.steps_done == 7:
                        kept.add(opt)
                opt.flush()
                found.append((cast("Any", opt).chosen, opt.steps_done, spread(model.module)))
    return found


def frameworks(rank: int) -> list[tuple[str, float, bool]]:
    """The callbacks without a codec and with a design, with classes that imitate the frameworks."""
    found = []
    for framework, design in itertools.product(("transformers", "lightning.pytorch"), ("auto", "local-sgd[h=3]")):
        model = DistributedDataParallel(mlp(0))
        inner = adamw(model)
        holder = SimpleNamespace(optimizer=inner)
        trainer: Any = SimpleNamespace(model=model.module, model_wrapped=model, optimizer=holder, world_size=2)
        trainer.strategy = SimpleNamespace(model=model, optimizers=[inner])
        args: Any = SimpleNamespace(world_size=2), SimpleNamespace(global_step=0), None
        with measured(LINKS["local-sgd[h=4]"]):
            if framework == "transformers":
                names = ("Trainer", "TrainerCallback", "TrainerControl", "TrainerState", "TrainingArguments")
                callback = stub(framework, *names).ThinwireCallback(trainer, design=design)
                callback.on_train_begin(*args)
            else:
                sys.modules["lightning"] = types.ModuleType("lightning")
                callback = stub(framework, "Callback", "LightningModule", "Trainer").ThinwireCallback(design=design)
                callback.on_fit_start(trainer, model.module)
                callback.on_train_start(trainer, model.module)
                [holder.optimizer] = trainer.strategy.optimizers
            for number in range(9):
                step(model, holder.optimizer, rank, number)
            if framework == "transformers":
                callback.on_train_end(*args)
            else:
                callback.on_train_end(trainer, model.module)
                [holder.optimizer] = trainer.strategy.optimizers
        chosen = getattr(callback.optimizer, "chosen", type(callback.optimizer).__name__)
        found.append((chosen, spread(model.module), holder.optimizer is inner))
    return found


def compiled(rank: int) -> float:
    module = mlp(rank)
    model: Any = torch.compile(module, backend="eager")
    with tw.distribute(model, sgd(module)) as opt:
        for number in range(3):
            step(model, opt, rank, number)
        return spread(module)


def several(rank: int) -> tuple[str, str, float]:
    """Two optimizers of which one is adaptive, and parameters that one rank alone uses."""
    model = nn.ModuleDict({"one": mlp(0), "other": mlp(0)})
    model.forward = lambda x: model["one"](x) + (model["other"](x) if rank else 0.0)
    both = [torch.optim.SGD(model["one"].parameters(), lr=0.1), torch.optim.AdamW(model["other"].parameters())]
    with measured(1e12), cast("AutoOptimizer", tw.distribute(model, both)) as opt:
        for number in range(7):
            step(model, opt, rank, number)
        return opt.chosen, opt.report().choice, spread(model)


def misuse(rank: int) -> dict[str, str]:
    model = mlp(0)
    made = {"adamw": adamw(model), "sgd": sgd(model)}
    auto = partial(tw.distribute, model, made["adamw"])
    found = {name: refusal(partial(auto, **{name: 1})) for name in DECIDED}
    found["codec"] = refusal(partial(auto, design="auto", codec="3lc"))
    found["classes"] = refusal(partial(tw.distribute, model, [made["adamw"], made["sgd"]][rank]))
    found["torch"] = refusal(partial(auto, resume=made["adamw"].state_dict()))
    with measured(1e12), auto() as opt:
        saved = opt.state_dict()
    found["other"] = refusal(partial(tw.distribute, model, made["sgd"], resume=saved))
    found["steps"] = refusal(partial(auto, resume={**saved, "auto": {**saved["auto"], "taken": rank}}))
    found["rank"] = refusal(partial(auto, resume={**saved, "auto": {**saved["auto"], "ranks": [1 - rank, 2]}}))
    damages: tuple[dict[str, Any], ...] = (
        *({"taken": each} for each in (-5, "x", None)),
        *({"kind": each} for each in ("local", "gradients", "x")),
        *({"link_bps": each} for each in (-1.0, float("nan"))),
        {"seconds": [-1.0]},
        {"ranks": [rank]},
        {"more": 1},
    )
    states = [{**saved["auto"], **each} for each in damages]
    wrong: list[dict[str, Any]] = [{**saved, "auto": each} for each in (*states, None, {}, [saved["auto"]])]
    found["damaged"] = "\n".join(refusal(partial(auto, resume=each)) for each in wrong)
    fewer = {**saved, "param_groups": [{**saved["param_groups"][0], "params": [0]}]}
    found["groups"] = refusal(partial(auto, resume=fewer))
    holder: Any = adamw(model)
    holder.optimizer = made["sgd"]
    with measured(1e12), auto(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            model(batch(rank, 0)[0]).sum().backward()
            made["sgd"].step()
        found["replaced"] = " ".join(str(each.message) for each in told)
    found["framework"] = refusal(partial(tw.distribute, model, holder))
    alone = [dist.new_group([each]) for each in range(2)]
    found["ranks"] = refusal(partial(tw.distribute, DistributedDataParallel(mlp(0)), adamw(model), group=alone[rank]))
    with tw.distribute(model, made["sgd"]):
        found["wrapped later"] = refusal(partial(DistributedDataParallel(model), batch(rank, 0)[0]))
    sharded = mlp(0)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    found["fsdp"] = refusal(partial(tw.distribute, sharded, adamw(sharded)))
    return found


@pytest.fixture(scope="module")
def ranks() -> dict[str, list[Any]]:
    cases: dict[str, tuple[Any, ...]] = {}
    for link in LINKS:
        cases |= {f"{link} {wrapped}": (train, wrapped, link) for wrapped in (False, True)}
    for link, stop in (("plain all-reduce", 2), ("plain all-reduce", 7), ("local-sgd[h=4]", 3), ("local-sgd[h=4]", 7)):
        cases[f"{link} {stop=}"] = (train, stop == 7, link, stop)
    cases |= {"accumulated": (train, False, "plain all-reduce", 0, 2), "scaled": (scaled,), "compiled": (compiled,)}
    cases |= {f"sgd {wrapped}": (train_sgd, wrapped) for wrapped in (False, True)}
    return run_cases(
        2, {**cases, "several": (several,), "frameworks": (frameworks,), "again": (again,), "misuse": (misuse,)}
    )


@pytest.mark.parametrize("link", LINKS)
def test_auto_choice_for_adaptive_optimizer_depends_on_link(ranks: dict[str, list[Any]], link: str) -> None:
    bare, wrapped = ranks[f"{link} False"], ranks[f"{link} True"]
    for found in (*bare, *wrapped):
        assert found["chosen"] == link and found["steps"] == STEPS and found["probes"] == 1 and found["rates"]
        assert (
            found["report"].startswith("auto: AdamW, link ") and f"a step computes 10 ms: {link} (" in found["report"]
        )
        assert all(found["equal"][:3]), "measured steps are each rank's own"
        assert found["exchange"] == ("NoneType" if link.startswith("plain") else "GroupOptimizer")
    for one, other in (bare, wrapped):
        assert torch.equal(one["shared"][:-80], other["shared"][:-80]) and torch.equal(one["end"], other["end"])
        if link.startswith("plain"):
            assert not any(one["equal"][3:]), "from the choice on replicas are equal after every step"
            assert torch.equal(one["moments"], other["moments"])
            assert one is bare[0] or all(map(torch.equal, one["grad"], other["grad"])), (
                "the script's wrapper averages again"
            )
        else:
            assert not torch.equal(one["moments"], other["moments"])
    same = torch.equal(bare[0]["end"], wrapped[0]["end"])
    assert same or not link.startswith("plain"), "a wrapper changes no bit"


def test_plain_all_reduce_averages_accumulated_gradients(ranks: dict[str, list[Any]]) -> None:
    one, other = ranks["accumulated"]
    assert torch.equal(one["end"], other["end"]) and not any(one["equal"][3:])
    assert not torch.equal(one["end"], ranks["plain all-reduce False"][0]["end"])


@pytest.mark.parametrize(
    ("link", "stop"),
    [(each, at) for each, *some in (("plain all-reduce", 2, 7), ("local-sgd[h=4]", 3, 7)) for at in some],
)
def test_auto_resume_is_bit_identical_without_measurement(ranks: dict[str, list[Any]], link: str, stop: int) -> None:
    for whole, resumed in zip(ranks[f"{link} {stop == 7}"], ranks[f"{link} {stop=}"], strict=True):
        assert resumed["chosen"] == link and resumed["steps"] == STEPS and resumed["probes"] == 0
        assert torch.equal(whole["end"], resumed["end"])


@pytest.mark.parametrize("wrapped", [False, True])
def test_auto_sgd_codes_gradients_from_first_step(ranks: dict[str, list[Any]], wrapped: bool) -> None:
    for found in ranks[f"sgd {wrapped}"]:
        assert found["first"] == "ddp.compress, auto" and found["kind"] == "ThinwireState"
        assert found["spread"] == found["again"] == 0.0
        assert found["report"].startswith("auto: SGD: gradients") and "thinwire" in found["report"]
        assert found["resumed"] == found["exchanged"] == 6
        assert wrapped or "and no method or part of it" in found["part"]


def test_auto_scaler_compiled_model_and_several_optimizers_train(ranks: dict[str, list[Any]]) -> None:
    assert ranks["scaled"] == [("local-sgd[h=4]", 8, 0.0)] * 2, "its scale may differ, so that nothing is summed"
    assert ranks["compiled"] == [0.0, 0.0]
    assert ranks["again"] == [[(link, 9, 0.0) for link in ("local-sgd[h=4]", "plain all-reduce") for _ in range(2)]] * 2
    assert ranks["frameworks"] == [[(name, 0.0, True) for name in ("local-sgd[h=4]", "GroupOptimizer") * 2]] * 2
    for chosen, choice, apart in ranks["several"]:
        assert chosen == "plain all-reduce" and choice.startswith("auto: SGD and AdamW, link 1000 Gbit/s") and not apart


def test_auto_invalid_arguments_raise_config_error(ranks: dict[str, list[Any]]) -> None:
    for rank, found in enumerate(ranks["misuse"]):
        for name in ("codec", *DECIDED):
            assert f"design='auto' decides {name} itself; leave it out, or name a design" in found[name], found[name]
        assert "rank 1 has optimizer = 'SGD' and rank 0 has 'AdamW'" in found["classes"]
        assert "load it into that one, before tw.distribute" in found["torch"]
        assert "the state is of AdamW, and this optimizer is SGD" in found["other"]
        assert "rank 1 has resumes = 'nothing yet at step 1' and rank 0 has 'nothing yet at step 0'" in found["steps"]
        assert f"the state is of rank {1 - rank}, and this is rank {rank}" in found["rank"]
        damaged = found["damaged"].splitlines()
        assert len(damaged) == 14 and all(
            "ConfigError: the state of tw.distribute is damaged" in each for each in damaged
        )
        assert "a group of 1 parameters; here it has" in found["groups"]
        assert (
            found["replaced"].count("a SGD has taken a step with parameters that tw.distribute trains with AdamW") == 1
        )
        assert "optimizer.optimizer = tw.distribute(model, optimizer.optimizer)" in found["framework"]
        assert f"over ranks [0, 1], and the training is over [{rank}]" in found["ranks"]
        assert "wrap the model before tw.distribute" in found["wrapped later"]
        assert "fsdp.compress" in found["fsdp"]


@pytest.mark.parametrize(("name", "said"), [("sgd", "auto: SGD: gradients"), ("adamw", "auto: AdamW, link ")])
def test_auto_example_prints_choice(name: str, said: str) -> None:
    example = Path(__file__).parents[3] / "examples" / "one_line.py"
    text = run_script(2, example, "--steps", "60", "--optimizer", name, "--link", "20mbit")
    assert said in text and "tbf rate 20mbit" in text and "kB a step and rank" in text
    assert float(text.partition("test accuracy ")[2].partition("%")[0]) > 80
