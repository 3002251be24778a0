"""What the examples train on: two image sets, Python's own source as text, batches by rank, and a small transformer."""

from __future__ import annotations

import gzip
import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from thinwire.policies.sampling import SharedEpochs

DIGITS = Path(__file__).with_name("digits.npz")
"""UCI's optical recognition of handwritten digits (CC BY 4.0): 1,347 images of 8×8 pixels to train on, 450 to test."""
FASHION = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts it."""
VOCABULARY, CONTEXT = 128, 64


@dataclass(frozen=True, kw_only=True)
class Data:
    """A training set and a test set: uint8 inputs, and labels or the next bytes."""

    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor
    mean: torch.Tensor | float = 0.0
    std: torch.Tensor | float = 1.0

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what a model reads: standardised pixels, or bytes as int64."""
        return x.long() if x.ndim == 2 else (x.float() - self.mean) / self.std


def load(name: str) -> Data:
    """Returns `digits`, `fashion-mnist` or `text`."""
    if name == "digits":
        with np.load(DIGITS) as file:
            train_x, train_y, test_x, test_y = (torch.from_numpy(file[each]) for each in file.files)
        mean, std = train_x.double().mean(0), train_x.double().std(0, correction=0)
        std[std == 0] = 1.0  # the corners are never inked
        return Data(train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y, mean=mean.float(), std=std.float())
    if name == "fashion-mnist":
        if not FASHION.is_dir():
            raise SystemExit(f"error: {FASHION} is missing: apt-get install dataset-fashion-mnist")
        train_x, test_x = (_idx(f"{part}-images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28) for part in ("train", "t10k"))
        train_y, test_y = (_idx(f"{part}-labels-idx1-ubyte.gz", 8) for part in ("train", "t10k"))
        pixels = train_x.double()
        return Data(
            train_x=train_x,
            train_y=train_y,
            test_x=test_x,
            test_y=test_y,
            mean=pixels.mean().float(),
            std=pixels.std(correction=0).float(),
        )
    if name == "text":
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        files = [file for file in files if not file.name.startswith("_sysconfigdata")]  # differ between machines
        train, test = (
            _windows(b"".join(file.read_bytes() for at, file in enumerate(files) if (at % 10 == 0) is held_out))
            for held_out in (False, True)
        )
        return Data(train_x=train[:, :-1], train_y=train[:, 1:], test_x=test[:, :-1], test_y=test[:, 1:])
    raise SystemExit(f"error: unknown data {name!r}; there are digits, fashion-mnist and text")


def _idx(name: str, header_nbytes: int) -> torch.Tensor:
    with gzip.open(FASHION / name) as file:
        return torch.frombuffer(bytearray(file.read()[header_nbytes:]), dtype=torch.uint8)


def _windows(text: bytes) -> torch.Tensor:
    """Returns (windows, CONTEXT + 1) bytes; the last of a window is the first of the next."""
    values = torch.frombuffer(bytearray(text), dtype=torch.uint8).clamp_(max=VOCABULARY - 1)
    return values.unfold(0, CONTEXT + 1, CONTEXT)


class Batches(Iterator[tuple[torch.Tensor, torch.Tensor]]):
    """An endless sequence of (inputs, targets) of one rank: no example goes to two ranks, or twice in an epoch.

    Its position is the number of the next step, so a resumed training goes on with the batch that would have come.
    """

    def __init__(self, data: Data, *, rank: int, world: int, batch: int, seed: int = 0) -> None:
        self.data, self.rank, self.world, self.step = data, rank, world, 0
        members = ((0, tuple(range(world))),)
        self.epochs = SharedEpochs(len(data.train_x), batch=batch, seed=seed, memberships=members, name="data")
        self.epoch_steps = len(data.train_x) // world // batch

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.epochs.rows(self.rank, self.step)
        self.step += 1
        return self.data.inputs(self.data.train_x[rows]), self.data.train_y[rows].long()

    def state_dict(self) -> dict[str, int]:
        """The position; the same on every rank."""
        return {"step": self.step, "world": self.world, "epoch": max(0, self.step - 1) // self.epoch_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on from a position; of another number of ranks, with the next whole epoch."""
        same = state["world"] == self.world
        self.step = state["step"] if same else (state["epoch"] + 1) * self.epoch_steps


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the mean over all targets, in nats; logits are (batch, classes) or (batch, time, classes)."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, data: Data, *, every: int = 1) -> tuple[float, float]:
    """Returns the accuracy, 0 … 1, and the mean loss in nats on every so many test examples."""
    model.eval()
    right, loss, count = 0, 0.0, 0
    for x, y in zip(data.test_x[::every].split(512), data.test_y[::every].long().split(512), strict=True):
        logits = model(data.inputs(x))
        right += int((logits.argmax(-1) == y).sum())
        loss += float(cross_entropy(logits, y)) * y.numel()
        count += y.numel()
    model.train()
    return right / count, loss / count


def digest(model: nn.Module) -> str:
    """Returns a digest of the parameters' bits: all ranks must agree on it."""
    bits = (value.detach().numpy().tobytes() for _, value in sorted(model.named_parameters()))
    return hashlib.blake2b(b"".join(bits), digest_size=8).hexdigest()


class Block(nn.Module):
    """A transformer block: causal attention with four heads, then a four-fold MLP, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        heads = (part.view(batch, time, 4, width // 4).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, 2))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        result: torch.Tensor = x + self.mlp(self.norm2(x))
        return result


class Transformer(nn.Module):
    """Predicts the next byte; 120,064 parameters with two blocks of width 64, the same on every rank."""

    def __init__(self, width: int = 64, blocks: int = 2, seed: int = 0) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.layers = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        torch.manual_seed(seed)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.layers(self.embed(x) + self.position.weight)))
        return logits
