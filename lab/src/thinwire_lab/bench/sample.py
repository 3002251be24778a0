"""Every codec's size and error on real gradients."""

from __future__ import annotations

import warnings

import torch

from thinwire.codecs import decode, registry
from thinwire.errors import ConfigError
from thinwire.frames import parse
from thinwire.reports.codec_sample import Sample
from thinwire_lab.jobs.job import Job
from thinwire_lab.workloads.recipes import recipe

WARM_STEPS = 60


def real_gradients(steps: int = WARM_STEPS) -> list[torch.Tensor]:
    """Returns the weight gradients of the digits MLP after `steps` steps of its recipe."""
    usual = recipe("mlp", "digits")
    job = Job(design="fp32", model="mlp", data="digits", workers=1, batch=usual.batch * usual.workers)
    made = job.workload()
    for step in range(steps):
        if step:
            made.optimizer.step()
        made.optimizer.zero_grad()
        made.backward()
    return [each.grad.clone() for each in made.model.parameters() if each.grad is not None and each.ndim > 1]


def sample_codecs(sample: list[torch.Tensor] | None = None) -> list[Sample]:
    """Measures every registered codec with its defaults."""
    sample = real_gradients() if sample is None else sample
    values = sum(gradient.numel() for gradient in sample)
    norm = sum(float(gradient.norm() ** 2) for gradient in sample) ** 0.5
    rows = []
    for codec_id in registry.ids():
        codec = registry.codec(codec_id)
        payload = 0
        lost = fed = 0.0
        for gradient in sample:
            frame = codec.encode(gradient)
            payload += len(parse(frame, copy=False).payload)
            lost += float((decode(frame) - gradient).norm() ** 2)
            fed += _after_feedback(codec_id, gradient)
        bits = 8 * payload / values
        kept = codec.residual_by_default
        rows.append(
            Sample(codec_id, bits, 32 / bits if bits else 0.0, lost**0.5 / norm, fed**0.5 / norm if kept else None)
        )
    return rows


def _after_feedback(codec_id: str, gradient: torch.Tensor, turns: int = 10) -> float:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            context = registry.codec(codec_id).context(gradient)
    except ConfigError:
        return 0.0
    total = torch.zeros_like(gradient)
    for _ in range(turns):
        decode(context.encode(gradient), out=total, accumulate=True)
    return float((total / turns - gradient).norm() ** 2)
