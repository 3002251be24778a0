"""The states of random generators, on the host and on GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from thinwire.hooks.chance import chance_of, set_chance


def test_what_was_drawn_is_drawn_again() -> None:
    model = torch.nn.Linear(2, 2)
    state = chance_of(model)
    drawn = torch.rand(3)
    set_chance(state)
    assert torch.equal(torch.rand(3), drawn) and list(state) == ["cpu"]


def test_gpus_of_the_model_are_among_them_and_those_that_are_not_here_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.tensor([int(device[-1])]))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: kept.update({device: state}))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    on = [SimpleNamespace(is_cuda=True, device=torch.device(f"cuda:{at}")) for at in (2, 1, 1)]
    model: Any = SimpleNamespace(parameters=lambda: [*on, SimpleNamespace(is_cuda=False)])
    state = chance_of(model)
    assert list(state) == ["cpu", "cuda:1", "cuda:2"]
    set_chance(state)
    assert list(kept) == ["cuda:1"] and kept["cuda:1"].item() == 1
