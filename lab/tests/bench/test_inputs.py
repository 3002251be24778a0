"""The gradients that codecs and servers are measured on are those of a training."""

from __future__ import annotations

import pytest
import torch

from thinwire_lab.bench.inputs import training
from thinwire_lab.jobs.job import Job
from thinwire_lab.jobs.workload import workload


@pytest.mark.parametrize("model", ["mlp", "mlp-tanh"])
def test_the_first_gradients_are_those_of_a_worker(model: str) -> None:
    """Also of a recipe that has another loss than cross-entropy."""
    job = Job(design="fp32", model=model, data="digits", workers=2)
    _, _, gradients = training(job)
    made = workload(job)
    made.backward()
    found, wanted = next(gradients), [each.grad for each in made.model.parameters()]
    assert all(own is not None and torch.equal(each, own) for each, own in zip(found, wanted, strict=True))
