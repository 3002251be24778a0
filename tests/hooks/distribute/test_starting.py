"""How a worker begins: which state it loads, which buffers stay its own, and random generators as they were."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from thinwire.hooks.chance import chance_of, set_chance
from thinwire.hooks.resuming import Resumable
from thinwire.hooks.starting import agree, start


class Several(Resumable):
    """Has states of some exchanges, and says which one was loaded."""

    def __init__(self, steps: tuple[int, ...] | None) -> None:
        self._steps = steps
        self.loaded: list[int] = []

    def steps(self) -> tuple[int, ...] | None:
        return self._steps

    def load(self, step: int) -> Mapping[str, Any] | None:
        self.loaded.append(step)
        return {"of": step} if step else None


class Tensor:
    """A buffer or a parameter: `local` is what the model has, `values` what came from the shards."""

    def __init__(self, *, state: bool) -> None:
        self.state = state
        self.local, self.values = torch.ones(2), torch.zeros(2)
        self.done: list[str] = []

    def read(self) -> None:
        self.done.append("read")

    def write(self) -> None:
        self.done.append("write")


def worker_of(*tensors: Tensor, late: bool = False) -> Any:
    counters = dict.fromkeys(("updates_lost", "residuals_lost"), 0.0)
    model = SimpleNamespace(tensors=tensors)
    calls: dict[str, Any] = {"agree": lambda steps: steps[-1], "start": lambda agreed: None}
    return SimpleNamespace(model=model, counters=counters, began_late=late, began_bare=False, **calls)


ASKS: Any = SimpleNamespace(run=lambda outcome: outcome)
ASKS_NO_SHARD: Any = None


def test_no_shard_is_asked_of_one_state_or_none() -> None:
    kept = Several(None)
    for resume, state in ((None, None), ({"step": 7}, {"step": 7}), (kept, None)):
        assert agree(worker_of(), ASKS_NO_SHARD, resume) == (None, state)
    assert kept.loaded == []


def test_agreed_state_of_several_is_loaded_and_the_model_read_anew() -> None:
    for steps, state in (((9, 6), {"of": 6}), ((3, 0), None)):
        kept, tensors = Several(steps), [Tensor(state=False), Tensor(state=True)]
        assert agree(worker_of(*tensors), ASKS, kept) == (steps[-1], state)
        assert kept.loaded == [steps[-1]]
        assert all(tensor.done == ["read"] for tensor in tensors)


def test_buffers_stay_those_of_a_worker_that_resumes() -> None:
    for resumed, late in ((True, False), (True, True), (False, False)):
        parameter, buffer = tensors = Tensor(state=False), Tensor(state=True)
        start(worker_of(*tensors, late=late), ASKS, None, resumed=resumed)
        own = resumed and not late
        assert buffer.values.tolist() == [1.0 * own] * 2 and buffer.done == ["write"] * own
        assert parameter.values.tolist() == [0.0, 0.0] and parameter.done == []


def test_random_generators_of_host_and_the_model_s_gpus_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    state = chance_of(torch.nn.Linear(2, 2))
    drawn = torch.rand(3)
    set_chance(state)
    assert torch.equal(torch.rand(3), drawn) and list(state) == ["cpu"]
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
