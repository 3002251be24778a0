"""What a run may be asked to be."""

from __future__ import annotations

from typing import Any

import pytest

from thinwire.errors import ConfigError
from thinwire_lab.jobs.job import Job
from thinwire_lab.workloads.recipes import recipe

IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"steps": 10, "seconds": 1.0}, "a number of steps or a time budget, not both"),
    ({"workers": 0}, "workers is 0; expected 1 or more"),
    ({"servers": 0}, "0 servers; at least 1"),
    ({"servers": 2, "servers_on_workers": True}, "2 servers, and one on every worker's node"),
    ({"steps": 0}, "steps is 0; expected 1 or more"),
    ({"steps": -5}, "steps is -5"),
    ({"seconds": 0.0}, "a time budget is positive"),
    ({"seconds": float("nan")}, "nan seconds; a time budget is positive"),
    ({"seconds": float("inf")}, "inf seconds; a time budget is positive and finite"),
    ({"batch": 0}, "batch is 0; expected 1 or more"),
    ({"lr": 0.0}, "learning rate is 0.0; expected a positive number"),
    ({"lr": -0.1}, "learning rate is -0.1"),
    ({"lr": float("inf")}, "learning rate is inf"),
    ({"lr": float("nan")}, "learning rate is nan"),
    ({"eval_every": -1.0}, "evaluations every -1.0 seconds"),
    ({"eval_every": float("inf")}, "evaluations every inf seconds"),
    ({"design": "4lc"}, "unknown design '4lc' \\(did you mean '3lc'\\?\\); there are "),
    ({"design": "3lc[s=2]"}, r"sparsity=2; it must lie in \[1, 2\)"),
    ({"model": "lenet6"}, "lenet6"),
    ({"data": "imagenet"}, "imagenet"),
    ({"schedule": "stairs"}, "unknown schedule 'stairs'; allowed are cosine"),
    ({"optimizer": "LAMB"}, "unknown optimizer 'LAMB'"),
    ({"segments": "own"}, "unknown segments 'own'; allowed are drawn, fixed"),
    ({"momentum": 1.0}, "momentum is 1.0"),
    (
        {"momentum": 0.5, "model": "byte-transformer", "data": "python-text"},
        "momentum 0.5 is of SGD; byte-transformer trains with Adam",
    ),
    ({"momentum": 0.0, "optimizer": "Adam"}, "momentum 0 is of SGD; mlp trains with Adam"),
    ({"schedule": "exponential", "final": 0.0}, "final is 0, to which no rate falls exponentially"),
    ({"dropout": 1.0}, "dropout is 1.0; expected 0 or more and below 1"),
    ({"dropout": 0.2, "model": "resnet8"}, "dropout 0.2: resnet8 has no place for it; mlp, "),
    ({"device": "meta"}, "device 'meta'; allowed are cpu, cuda, and one of several as in cuda:1"),
    ({"device": "cuda:99"}, r"device 'cuda:99': torch .* sees \d+ CUDA devices here; use cpu"),
]


def test_what_cannot_be_is_refused_before_anything_starts() -> None:
    for options, text in IMPOSSIBLE:
        with pytest.raises(ConfigError, match=text):
            Job(**options)


def test_the_recipe_fills_in_what_was_not_given() -> None:
    expected = recipe("mlp", "digits", design="fp32")
    found = Job(design="fp32", workers=3).recipe()
    assert (found.workers, found.batch, found.lr, found.steps) == (3, expected.batch, expected.lr, expected.steps)
    found = Job(batch=5, lr=0.125, steps=7).recipe()
    assert (found.batch, found.lr, found.steps) == (5, 0.125, 7)
    scaled = Job(model="resnet110", data="cifar10", workers=5, design="fp32").recipe()
    assert (scaled.lr, scaled.steps, scaled.workers) == (0.5, 51_200, 5)
    assert Job(model="resnet110", data="cifar10", workers=5, lr=0.2).recipe().lr == 0.2
    paper: dict[str, Any] = {"schedule": "polynomial", "final": 0.0, "momentum": 0.0, "weight_decay": 5e-4}
    paper |= {"dropout": 0.2, "segments": "fixed"}
    found = Job(**paper).recipe()
    assert {name: getattr(found, name) for name in paper} == paper
    assert Job(optimizer="Adam", weight_decay=0.0).recipe().optimizer == "Adam"


def test_the_design_is_spelled_out() -> None:
    assert Job(design="3lc[s=1.75]").full_design().up.config()["sparsity"] == 1.75
