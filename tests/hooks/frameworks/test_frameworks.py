"""Adapters to frameworks: with classes that stand for a framework, and, marked so, with the frameworks themselves."""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.hooks.ddp_ranks import batch, mlp, run_cases, run_script, same, train
from thinwire.runtime.record_files import RecordFile

TRAINER = ("Trainer", "TrainerCallback", "TrainerControl", "TrainerState", "TrainingArguments")
ADAPTERS = {"lightning": "lightning", "transformers": "transformers accelerate"}


def test_missing_framework_error_names_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for framework, packages in ADAPTERS.items():
        monkeypatch.setitem(sys.modules, framework, None)
        monkeypatch.delitem(sys.modules, f"thinwire.hooks.{framework}", raising=False)
        with pytest.raises(ModuleNotFoundError, match=f"pip install {packages}$") as raised:
            importlib.import_module(f"thinwire.hooks.{framework}")
        assert raised.value.name == framework


def stub(framework: str, *names: str) -> Any:
    """Returns an adapter, imported beside a framework that has nothing but these classes."""
    module: Any = types.ModuleType(framework)
    for name in names:
        setattr(module, name, type(name, (), {}))
    sys.modules[framework] = module
    return importlib.import_module(f"thinwire.hooks.{framework.partition('.')[0]}")


def run_nodes(rank: int, folder: str, resumes: bool, loses: int) -> tuple[int, list[str], bool]:
    """The Trainer's callback on two machines with a disk each, of which one may have lost its file."""
    adapter = stub("transformers", *TRAINER)
    place = Path(folder) / f"node{rank}" / "checkpoint-3"
    place.mkdir(parents=True, exist_ok=True)
    module = mlp()
    if resumes:
        module.load_state_dict(torch.load(place / "model.pt"))
        if rank == loses == 0:
            (place / adapter.FILE).write_bytes((place / adapter.FILE).read_bytes()[:1000])  # killed while it was saved
        elif rank == loses:
            (place / adapter.FILE).unlink(missing_ok=True)
    model = DistributedDataParallel(module)
    callback = adapter.ThinwireCallback(
        SimpleNamespace(model=module, model_wrapped=model, accelerator=SimpleNamespace()),
        "3lc",
        sparsity=1.75,
        measure_link=False,
        telemetry=place / "steps.jsonl",
    )
    args: Any = SimpleNamespace(world_size=2, output_dir=str(place.parent), resume_from_checkpoint=None)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        callback.on_train_begin(args, SimpleNamespace(global_step=3 if resumes else 0), None)
    begun = callback.state.step
    waits = any(bool(each.any()) for each in callback.state.core.residuals.state_dict()["residuals"].values())
    train(model, rank, 3, first=begun)
    callback.on_log(args, SimpleNamespace(), None, logs={"loss": 0.25})
    callback.on_log(args, SimpleNamespace(), None, logs={"eval_loss": 0.5})
    callback.on_train_end(args, SimpleNamespace(), None)
    if not resumes:
        records = list(RecordFile(place / "steps.jsonl").read())
        assert {each.step for each in records if each.table} == {0}
        assert [(each.step, each.loss) for each in records if each.loss is not None] == [(2, 0.25)]
        torch.save(module.state_dict(), place / "model.pt")
        callback.on_save(args, SimpleNamespace(global_step=3, is_world_process_zero=rank == 0), None)
        with warnings.catch_warnings(record=True) as absent:
            warnings.simplefilter("always")
            callback.on_save(args, SimpleNamespace(global_step=6, is_world_process_zero=rank == 0), None)
        told = ["checkpoint-6: the residuals of all ranks are not saved" in str(each.message) for each in absent]
        assert told == [True] * (rank == 0)
    return begun, [str(each.message) for each in heard if "residuals begin at zero" in str(each.message)], waits


def run_float16(rank: int) -> list[tuple[bool, int]]:
    """A first step that overflows, in both callbacks: whether the hook follows the scaler, and steps skipped."""
    found = []
    for framework in ("transformers", "lightning.pytorch"):
        model = DistributedDataParallel(mlp())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        if framework == "transformers":
            accelerator = SimpleNamespace(scaler=scaler)
            trainer: Any = SimpleNamespace(model=model.module, model_wrapped=model, accelerator=accelerator)
            callback = stub(framework, *TRAINER).ThinwireCallback(trainer, "3lc", measure_link=False)
            callback.on_train_begin(SimpleNamespace(world_size=2), SimpleNamespace(global_step=0), None)
        else:
            sys.modules["lightning"] = types.ModuleType("lightning")
            adapter = stub(framework, "Callback", "LightningModule", "Trainer")
            callback = adapter.ThinwireCallback("3lc", measure_link=False)
            precision = SimpleNamespace(scaler=scaler)
            trainer = SimpleNamespace(strategy=SimpleNamespace(model=model), world_size=2, precision_plugin=precision)
            callback.on_fit_start(trainer, model.module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for factor in (torch.inf, 1.0):
            x, y = batch(rank, 0)
            optimizer.zero_grad()
            scaler.scale(factor * nn.functional.cross_entropy(model(x), y)).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
        found.append((callback.state.state_dict()["loss_scale"] == 2.0**9, callback.state.steps_skipped))
    return found


def sharded(mesh: DeviceMesh) -> Any:
    module = mlp()
    for layer in module:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def waiting(state: Any) -> dict[str, torch.Tensor]:
    residuals: dict[str, torch.Tensor] = state.state_dict()["ranks"][str(state.rank)]["residuals"]
    return residuals


def run_sharded(rank: int, folder: str, replicas: int) -> dict[str, Any]:
    """Both callbacks with a model that FSDP2 has sharded, among two ranks or at two sites: saved, and resumed."""
    shape = (replicas, 2) if replicas else (2,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    adapter, found = stub("transformers", *TRAINER), dict[str, Any]()
    (place := Path(folder) / "checkpoint-3").mkdir(exist_ok=True)
    args: Any = SimpleNamespace(world_size=2 * max(1, replicas), output_dir=folder, resume_from_checkpoint=None)

    def of_trainer(model: Any, step: int) -> Any:
        trainer: Any = SimpleNamespace(model=model, model_wrapped=model, accelerator=SimpleNamespace())
        callback = adapter.ThinwireCallback(trainer, "3lc", sparsity=1.75, measure_link=False)
        callback.on_train_begin(args, SimpleNamespace(global_step=step), None)
        return callback

    model = sharded(mesh)
    first = of_trainer(model, 0)
    train(model, rank, 3)
    dist.barrier()
    first.on_save(args, SimpleNamespace(global_step=3, is_world_process_zero=rank == 0), None)
    dist.barrier()
    again = of_trainer(_copied(model, sharded(mesh)), 3)
    found["Trainer"] = (
        (place / adapter.FILE).exists(),
        again.state.step,
        same(waiting(first.state), waiting(again.state)),
    )
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found["of other weights"] = of_trainer(sharded(mesh), 3).state.step
    found["told"] = sum("residuals begin at zero" in str(each.message) for each in heard)

    sys.modules["lightning"] = types.ModuleType("lightning")
    adapter = stub("lightning.pytorch", "Callback", "LightningModule", "Trainer")

    def lightning_trainer(model: Any) -> Any:
        strategy, precision = SimpleNamespace(model=model), SimpleNamespace()
        return SimpleNamespace(strategy=strategy, world_size=args.world_size, precision_plugin=precision)

    def of_lightning(model: Any) -> Any:
        callback = adapter.ThinwireCallback("3lc", sparsity=1.75, measure_link=False)
        callback.on_fit_start(lightning_trainer(model), model)
        return callback

    model = sharded(mesh)
    first = of_lightning(model)
    train(model, rank, 3)
    told: list[Any] = [first.state_dict()]
    dist.broadcast_object_list(told)
    again = of_lightning(sharded(mesh))
    again.load_state_dict(told[0])  # after the model was sharded
    found["Lightning"] = again.state.step, same(waiting(first.state), waiting(again.state))
    state = first.state
    first.teardown(lightning_trainer(model), model, "fit")
    first.setup(lightning_trainer(model), model, "fit")
    first.on_fit_start(lightning_trainer(model), model)  # FSDP2's model is the one of the fit before
    train(model, rank, 1, first=3)
    found["second fit"] = first.state is state, state.step
    # A fit that raised has no teardown, and the next one's checkpoint may come before there is a model.
    wrapped = DistributedDataParallel(mlp())
    first = of_lightning(wrapped)
    train(wrapped, rank, 2)
    told, waited = [first.state_dict()], waiting(first.state)
    dist.broadcast_object_list(told)
    train(wrapped, rank, 1, first=2)
    wrapped = DistributedDataParallel(mlp())
    first.setup(lightning_trainer(wrapped), wrapped, "fit")
    first.load_state_dict(told[0])
    first.on_fit_start(lightning_trainer(wrapped), wrapped)
    found["after a failure"] = first.state.step, same(waited, waiting(first.state))
    return found


def _copied(model: Any, other: Any) -> Any:
    """Returns the other model with this one's weights."""
    with torch.no_grad():
        for parameter, given in zip(other.parameters(), model.parameters(), strict=True):
            parameter.to_local().copy_(given.to_local())
    return other


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = str(tmp_path_factory.mktemp("nodes"))
    nodes = {"begun": (False, -1), "one file lost": (True, 1), "damaged": (True, 0)}
    cases: dict[str, tuple[Any, ...]] = {name: (run_nodes, folder, *given) for name, given in nodes.items()}
    cases |= {"float16": (run_float16,), "shards": (run_sharded, str(tmp_path_factory.mktemp("shards")), 0)}
    sites = {"sites": (run_sharded, str(tmp_path_factory.mktemp("sites")), 2)}
    return {**run_cases(2, cases), **run_cases(4, sites)}


def test_trainer_resumes_without_shared_disk(ranks: dict[str, list[Any]]) -> None:
    assert ranks["begun"] == [(0, [], False)] * 2
    assert ranks["one file lost"] == [(3, [], True)] * 2
    for begun, told, waits in ranks["damaged"]:
        assert (begun, len(told), waits) == (0, 1, False), "on all ranks or on none"


def test_callbacks_pass_float16_scaler(ranks: dict[str, list[Any]]) -> None:
    assert ranks["float16"] == [[(True, 1)] * 2] * 2


def test_callbacks_compress_fsdp2_and_resume_from_checkpoints(
    ranks: dict[str, list[Any]],
) -> None:
    for found in ranks["shards"] + ranks["sites"]:
        assert found["Trainer"] == (True, 3, True) and found["Lightning"] == (3, True), found
        assert (found["of other weights"], found["told"]) == (0, 1)
        assert found["second fit"] == (True, 4) and found["after a failure"] == (2, True), found


@pytest.mark.frameworks
@pytest.mark.parametrize("replicas", ["1", "2"])
def test_accelerate_fsdp2_is_compressed_and_resumes_from_checkpoints(replicas: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name("framework_ranks.py")
    said = run_script(4, script, "accelerate", str(tmp_path), replicas).splitlines()
    assert f"{replicas}: True 6 True" in said, said


@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("framework", "equal"), [("accelerate", "False True"), ("trainer", "True"), ("lightning", "False True")]
)
def test_framework_loops_with_local_updates(framework: str, equal: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name("framework_ranks.py")
    said = run_script(2, script, f"local {framework}", str(tmp_path)).splitlines()
    assert f"local: 8 steps, equal {equal}" in said, said
