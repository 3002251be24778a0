"""Options of a run: impossible ones raise ConfigError, and the recipe completes the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from thinwire.errors import ConfigError
from thinwire_lab.jobs.job import Job
from thinwire_lab.workloads.recipes import recipe
from thinwire_lab.workloads.training import find_device

IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"steps": 10, "seconds": 1.0}, "not both"),
    ({"workers": 0}, "workers"),
    ({"servers": 2, "servers_on_workers": True}, "2 servers"),
    ({"steps": 0}, "steps"),
    ({"seconds": float("nan")}, "budget"),
    ({"batch": 0}, "batch"),
    ({"lr": float("nan")}, "learning rate"),
    ({"design": "4lc"}, "'3lc'"),
    ({"design": "3lc[s=2]"}, "sparsity"),
    ({"model": "lenet6"}, "lenet6"),
    ({"data": "imagenet"}, "imagenet"),
    ({"momentum": 0.0, "optimizer": "Adam"}, "momentum"),
    ({"dropout": 0.2, "model": "resnet8"}, "dropout"),
    ({"device": "cuda:99"}, "cuda:99"),
]


def test_job_impossible_options_raise_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, name in IMPOSSIBLE:
        with pytest.raises(ConfigError, match=name):
            Job(**options)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [find_device(name).index for name in ("cpu", "cuda", "cuda:1")] == [None, None, 1]


def test_job_takes_missing_settings_from_the_recipe() -> None:
    expected = recipe("mlp", "digits", design="fp32")
    found = Job(design="fp32", workers=3).recipe()
    assert (found.workers, found.batch, found.lr, found.steps) == (3, expected.batch, expected.lr, expected.steps)
    scaled = Job(model="resnet110", data="cifar10", workers=5, design="fp32").recipe()
    assert (scaled.lr, scaled.steps, scaled.workers) == (0.5, 51_200, 5)
    given: dict[str, Any] = {"schedule": "polynomial", "final": 0.0, "momentum": 0.0, "weight_decay": 5e-4}
    given |= {"dropout": 0.2, "segments": "fixed", "batch": 5, "lr": 0.125, "steps": 7}
    found = Job(**given).recipe()
    assert {name: getattr(found, name) for name in given} == given
    assert Job(design="3lc[s=1.75]").full_design().up.config()["sparsity"] == 1.75


def test_workers_have_equal_weights_and_different_examples() -> None:
    first, second = (Job(workers=2).workload(rank) for rank in (0, 1))
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    assert not torch.equal(next(first.batches)[0], next(second.batches)[0])
