"""A state is of the memory format that its model had: residuals lie in the order in which DDP reduces."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.hooks.ddp_ranks import ddp, run_ranks
from thinwire.hooks.ddp.state import _order

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def made(name: str, group: dist.ProcessGroup | None = None) -> tuple[DistributedDataParallel, ddp.ThinwireState]:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 1))
    model = DistributedDataParallel(net.to(memory_format=FORMATS[name]), process_group=group)
    return model, ddp.compress(model, "topk", fraction=0.05, min_numel=10, measure_link=False)


def residuals(state: ddp.ThinwireState) -> dict[str, torch.Tensor]:
    return state.core.residuals.state_dict()["residuals"]


def told(state: ddp.ThinwireState, saved: dict[str, Any]) -> str:
    try:
        return state.load_state_dict(saved)
    except tw.ConfigError as error:
        assert not any(each.any() for each in residuals(state).values()), "nothing was changed"
        return str(error)


def run_formats(rank: int, folder: str) -> dict[tuple[str, str], list[str]]:
    """What every way to load a state of each memory format into a model of each says."""
    alone, said = dist.new_group([rank], use_local_synchronization=True), {}
    for was in FORMATS:
        model, state = made(was)
        model(torch.randn(4, 8, 9, 9, generator=torch.Generator().manual_seed(rank))).pow(2).mean().backward()
        own, whole = state.state_dict(), [ddp.AllRanks(state).state_dict()]
        dist.broadcast_object_list(whole)
        save({"ddp": own}, checkpoint_id=f"{folder}/{was}")
        for here in FORMATS:
            again = [made(here)[1] for _ in range(2)]
            kept = {"ddp": again[1].state_dict()}
            load(kept, checkpoint_id=f"{folder}/{was}")
            texts = [told(each, saved) for each, saved in zip(again, (own, kept["ddp"]), strict=True)]
            for each, text in zip(again, texts, strict=True):
                assert "bit for bit" not in text or all(
                    value.equal(own["ranks"][str(rank)]["residuals"][name]) for name, value in residuals(each).items()
                )
            said[was, here] = [*texts, told(made(here, alone)[1], whole[0])]
    return said


def test_state_of_another_memory_format_is_refused(tmp_path: Any) -> None:
    for said in run_ranks(2, run_formats, str(tmp_path)):
        for (was, here), (own, folder, resized) in said.items():
            if was == here:
                assert "bit for bit" in own and "bit for bit" in folder and "from 2 ranks on 1" in resized, said
            else:
                orders = {"contiguous": "[0, 1, 2, 3]", "channels_last": "[0, 2, 3, 1]"}
                for text in (own, folder, resized):
                    assert f"'0.weight' with its dimensions in the order {orders[was]}" in text, said
                    assert f"here it is {orders[here]}" in text and "model.to(memory_format=" in text, said


def test_order_of_dimensions_is_ddp_s() -> None:
    weight = torch.zeros(4, 3, 2, 5)
    volume = torch.zeros(4, 3, 2, 5, 6).to(memory_format=torch.channels_last_3d)
    assert _order(weight) == [0, 1, 2, 3] and _order(volume) == [0, 2, 3, 4, 1]
    assert _order(weight[:, :1].to(memory_format=torch.channels_last)) == [0, 2, 3], "one channel is the same in both"
    assert _order(weight[..., ::2].transpose(0, 1)) == [0, 1, 2, 3], "with holes"
    assert _order(torch.zeros(())) == [] and _order(torch.zeros(2, 0)) == [0, 1]
