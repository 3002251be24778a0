"""Scripts of `test_frameworks`: models that Accelerate shards, and local updates in the frameworks' own loops."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from thinwire.hooks import ddp, fsdp


class Net(nn.Module):
    """A classifier, of a seed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(x), labels)}


def examples() -> list[dict[str, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(3)
    return [{"x": torch.randn(16, generator=drawn), "labels": torch.tensor(i % 4)} for i in range(64)]


def left(state: Any) -> float:
    """The size of this rank's residuals."""
    residuals = state.state_dict()["ranks"][str(state.rank)]["residuals"]
    return sum(float(each.abs().sum()) for each in residuals.values())


def tell(text: object) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def accelerate(folder: Path, replicas: int) -> None:
    """FSDP2, or HSDP with replicas, by Accelerate: saved in the middle, and resumed from there.

    Accelerate shards only on GPUs; this function lifts the restriction.
    """
    accelerate: Any = importlib.import_module("accelerate")
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=False, state_dict_type="SHARDED_STATE_DICT"
    )
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = accelerate.DistributedType.FSDP, plugin
    if replicas > 1:
        shards = accelerator.num_processes // replicas
        sizes = accelerate.ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=shards)
        accelerator.state.parallelism_config = sizes
        accelerator.state.device_mesh = sizes.build_device_mesh("cpu")
    net: Any = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = accelerate.DistributedType.FSDP, plugin
    state = fsdp.compress(model, "3lc", sparsity=1.75, measure_link=False)
    accelerator.register_for_checkpointing(ddp.AllRanks(state))
    ends = []
    for begin in (0, 3):
        if begin:
            accelerator.load_state(str(folder))
        for step in range(begin, 6):
            if step == 3 and not begin:
                accelerator.save_state(str(folder))
            each = examples()[8 * step + accelerator.process_index]
            loss = model(each["x"][None], each["labels"][None])["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        ends.append(torch.cat([p.detach().full_tensor().flatten() for p in model.parameters()]))
    tell(f"{replicas}: {torch.equal(*ends)} {state.step} {left(state) > 0}")


def local_accelerate(_folder: Path) -> None:
    """Local updates in Accelerate's loop, with gradient accumulation."""
    accelerate: Any = importlib.import_module("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    net: Any = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    ours = tw.distribute(model, optimizer.optimizer, group=dist.group.WORLD, design="local-sgd[h=3]")
    optimizer.optimizer = ours
    for step in range(16):
        with accelerator.accumulate(model):
            each = examples()[2 * step + accelerator.process_index]
            accelerator.backward(model(each["x"][None], each["labels"][None])["loss"])
            optimizer.step()
            optimizer.zero_grad()
    tell_local(ours, net)


def local_trainer(folder: Path) -> None:
    """Local updates in the Trainer, by the callback, which ends them with the training."""
    transformers: Any = importlib.import_module("transformers")
    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        report_to=[],
        disable_tqdm=True,
        max_steps=8,
        save_strategy="no",
    )
    trainer = transformers.Trainer(Net(), settings, train_dataset=examples())

    callback = importlib.import_module("thinwire.hooks.transformers").ThinwireCallback(trainer, design="local-sgd[h=3]")
    trainer.add_callback(callback)
    trainer.train()
    tell(f"local: {callback.optimizer.steps_done} steps, equal {equal(trainer.model)}")


def local_lightning(_folder: Path) -> None:
    """Local updates in Lightning, as what `configure_optimizers` returns."""
    pytorch: Any = importlib.import_module("lightning.pytorch")

    class Module(pytorch.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: dict[str, torch.Tensor], _index: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> Any:
            inner = torch.optim.AdamW(self.parameters(), lr=0.01)
            return tw.distribute(self.trainer.strategy.model, inner, group=dist.group.WORLD, design="local-sgd[h=3]")

    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    training, module = pytorch.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, **quiet), Module()
    rows: Any = examples()
    training.fit(module, torch.utils.data.DataLoader(rows, batch_size=8))
    tell_local(training.optimizers[0], module.net)


def equal(net: nn.Module) -> bool:
    """Whether all ranks have the same parameters."""
    mine = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, mine)
    return all(torch.equal(mine, other) for other in all_of_them)


def tell_local(ours: Any, net: nn.Module) -> None:
    """Says how many steps were taken, and whether replicas are equal after the last exchange and not before."""
    before = equal(net)
    ours.flush()
    tell(f"local: {ours.steps_done} steps, equal {before} {equal(net)}")
    ours.close()


def main() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    ways: dict[str, Any] = {"accelerate": accelerate, "local accelerate": local_accelerate}
    ways |= {"local trainer": local_trainer, "local lightning": local_lightning}
    ways[sys.argv[1]](Path(sys.argv[2]), *map(int, sys.argv[3:]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
