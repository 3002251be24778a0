"""Figures of codecs on a GPU beside their table: a model's list of tensors, and a step of training it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from thinwire.codecs import codec, decode_all, encode_all
from thinwire.codecs.ternary_device import DeviceTernary
from thinwire_lab.bench.codec_figures import ZERO_FRACTION, Figure
from thinwire_lab.bench.inputs import draw, resnet50_sizes
from thinwire_lab.bench.resnet50 import ResNet50
from thinwire_lab.bench.timing import Candidate, side_by_side

IMAGES = 64
"""Of 224 by 224 pixels, in a step."""


def tensor_list(turns: int, device: torch.device) -> Figure:
    """ResNet-50's tensors in one call, and one flat tensor of the same size; whole calls, frames on the host."""
    sizes = resnet50_sizes()
    flat = torch.from_numpy(draw(sum(sizes), ZERO_FRACTION)[0]).to(device)
    tensors, scheme = list(torch.split(flat, sizes)), codec("3lc")
    contexts, whole = [scheme.context(tensor) for tensor in tensors], scheme.context(flat)
    candidates = [
        Candidate("list_seconds", lambda turn: encode_all(contexts, tensors), whole=True),
        Candidate("flat_seconds", lambda turn: whole.encode(flat), whole=True),
    ]
    seconds = side_by_side(candidates, turns=turns, device=device)
    ratio = seconds["list_seconds"] / seconds["flat_seconds"]
    values = {"tensors": len(sizes), "elements": sum(sizes), "zero_fraction": ZERO_FRACTION, **seconds}
    lines = [[f"3lc, {len(sizes)} tensors shaped like ResNet-50's: time", f"{ratio:.2f} × one flat tensor's", "≤ 2"]]
    return Figure(values=values, lines=lines)


def training_step(turns: int, device: torch.device, images: int = IMAGES, pixels: int = 224) -> Figure:
    """A step of ResNet-50 with SGD; and all its gradients encoded and decoded, frames on the host, beside nothing.

    By `encode_all` and `decode_all`, and by one call each way as in the DDP hook.
    """
    model = ResNet50().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(images, 3, pixels, pixels, device=device), torch.arange(images, device=device)

    def step(half: bool) -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    step(half=True)
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    contexts, outs = [codec("3lc").context(each) for each in gradients], [torch.empty_like(each) for each in gradients]

    together = DeviceTernary([codec("3lc").context(each) for each in gradients])
    given, filled = (np.array([each.data_ptr() for each in many]) for many in (gradients, outs))
    replaces = np.zeros(len(outs), np.bool_)

    def exchange() -> None:
        decode_all(encode_all(contexts, gradients), outs)

    def exchange_as_the_hook() -> None:
        frames = together.encode_on(gradients[0].device, given)
        assert frames is not None
        together.decode_on(gradients[0].device, frames, filled, replaces)

    candidates = [
        Candidate("float32_seconds", lambda turn: step(half=False), whole=True),
        Candidate("bfloat16_seconds", lambda turn: step(half=True), whole=True),
        Candidate("encode_seconds", lambda turn: encode_all(contexts, gradients), whole=True),
        Candidate("both_seconds", lambda turn: exchange(), whole=True),
        Candidate("hook_encode_seconds", lambda turn: together.encode_on(gradients[0].device, given), whole=True),
        Candidate("hook_both_seconds", lambda turn: exchange_as_the_hook(), whole=True),
    ]
    seconds = side_by_side(candidates, turns=turns, device=device)
    lines = [
        [f"3lc, ResNet-50, {images} images, {name}: encode + decode{how}", f"{share:.1%} of the step", "≤ 5 %"]
        for how, both in (("", "both_seconds"), (" as the hook does", "hook_both_seconds"))
        for name in ("float32", "bfloat16")
        for share in [seconds[both] / seconds[f"{name}_seconds"]]
    ]
    return Figure(values={"images": images, "tensors": len(gradients), **seconds}, lines=lines)


FIGURES: dict[str, Callable[[int, torch.device], Figure]] = {"list": tensor_list, "step": training_step}
"""By name; each is measured in so many turns."""
