"""What this rank has not sent yet: one residual for every value of every compressed parameter.

For slices that others own it holds what was left of this rank's gradient; for its own slices, what was left of the
average (DoubleSqueeze, algorithm 1, in all-reduce form). Residuals are kept by parameter name and slice, so they
survive DDP's bucket rebuild; they can be saved, put back for a step that nobody takes, and carried over to another
number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from thinwire.codecs import Context
from thinwire.errors import ConfigError
from thinwire.hooks.ddp.plan import Parameter, Slice, cut
from thinwire.policies.compression import PLAIN, Choice


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained tensor: its size, its dtype, how it travels, and where its residual is kept."""

    name: str
    numel: int
    dtype: torch.dtype
    choice: Choice
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def plain(self) -> bool:
        """Whether it travels uncompressed, together with all others that do."""
        return self.choice == Choice(PLAIN, PLAIN)

    @property
    def wide(self) -> torch.dtype:
        """What is computed in: float64 for float64, else float32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


class Residuals:
    """The compression contexts of one rank, by slice.

    Args:
        trained: every trained tensor, in an order that all ranks share.
        rank: this rank.
        world: how many ranks there are.
        mean: whether ranks average (True) or sum.
        seed: of random codecs; each rank derives its own stream.
    """

    def __init__(self, trained: Sequence[Trained], rank: int, world: int, *, mean: bool, seed: int) -> None:
        self.trained = {one.name: one for one in trained}
        self.rank = rank
        self.world = world
        self._mean = mean
        self.slices = self._cut(world)
        self.contexts: dict[Slice, Context] = {}
        for one in trained:
            if one.plain:
                continue
            for piece in self.slices[one.name]:
                codec = one.choice.down if piece.owner == rank else one.choice.up
                like = torch.empty(piece.stop - piece.start, dtype=one.wide, device=one.device)
                self.contexts[piece] = codec.context(like, name=piece.name, seed=seed * 65_537 + rank)
        self._saved: dict[Slice, tuple[int, torch.Tensor | None]] = {}

    def _cut(self, world: int) -> dict[str, tuple[Slice, ...]]:
        return cut([Parameter(one.name, one.numel, one.plain) for one in self.trained.values()], world)

    # ---- steps that nobody takes

    def remember(self) -> None:
        """Copies everything, so that `put_back` can undo a step."""
        for piece, context in self.contexts.items():
            residual = context.residual
            copy = self._saved.get(piece, (0, None))[1]
            if residual is not None:
                copy = residual.clone() if copy is None else copy.copy_(residual)
            self._saved[piece] = (context.step, copy)

    def put_back(self) -> None:
        """Returns to what `remember` saw, bit for bit."""
        for piece, (step, copy) in self._saved.items():
            context = self.contexts[piece]
            context.step = step
            if context.residual is not None and copy is not None:
                context.residual.copy_(copy)

    def scale(self, factor: float) -> None:
        """Multiplies every residual: gradients have come to be scaled differently."""
        for context in self.contexts.values():
            if context.residual is not None:
                context.residual.mul_(factor)

    # ---- checkpoints

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Returns copies: by parameter the residual (flat), and how often each of its slices was encoded."""
        residuals, encodes = {}, {}
        for one in self.trained.values():
            if one.plain:
                continue
            flat = torch.zeros(one.numel, dtype=one.wide)
            contexts = [self.contexts[piece] for piece in self.slices[one.name]]
            for piece, context in zip(self.slices[one.name], contexts, strict=True):
                if context.residual is not None:
                    flat[piece.start : piece.stop] = context.residual
            residuals[one.name] = flat
            encodes[one.name] = torch.tensor([context.step for context in contexts])
        return {"residuals": residuals, "encodes": encodes}

    def blank(self, world: int) -> dict[str, dict[str, torch.Tensor]]:
        """Returns zeros in the form that a rank of a `world`-rank run saves."""
        compressed = [one for one in self.trained.values() if not one.plain]
        slices = self._cut(world)
        return {
            "residuals": {one.name: torch.zeros(one.numel, dtype=one.wide) for one in compressed},
            "encodes": {one.name: torch.zeros(len(slices[one.name]), dtype=torch.int64) for one in compressed},
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError where a rank's state is not of this model and these codecs."""
        own = {one.name: one.numel for one in self.trained.values() if not one.plain}
        found = {name: value.numel() for name, value in state["residuals"].items()}
        if own != found:
            wrong = sorted(name for name in {*own, *found} if own.get(name) != found.get(name))
            here, there = ([sizes.get(name) for name in wrong[:4]] for sizes in (own, found))
            raise ConfigError(
                f"the state does not fit: {wrong[:4]} are here {here} and in the state {there} values; load it with "
                "the model and the exclusions it was saved with"
            )

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes back what the same rank of an equally large run saved."""
        self.check(state)
        for name, flat in state["residuals"].items():
            for piece, encodes in zip(self.slices[name], state["encodes"][name].tolist(), strict=True):
                context = self.contexts[piece]
                context.step = encodes
                if context.residual is not None:
                    context.residual.copy_(flat[piece.start : piece.stop])

    def load_from(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Takes over from a run with another number of ranks.

        What was still to be added to the averaged gradient is summed over the old ranks and divided over the new
        ones. A rank's residual counts in the average by 1/ranks, the owner's (of the average itself) in full, so

            T = Σ_old r_i/N_old + δ      every new holder gets T/holders: δ' = T/holders, r'_i = N_new·T/holders
        """
        for state in states:
            self.check(state)
        old = self._cut(len(states))
        for name, slices in self.slices.items():
            one = self.trained[name]
            if one.plain:
                continue
            total = np.zeros(one.numel, np.float64)
            for rank, state in enumerate(states):
                flat = state["residuals"][name].numpy().astype(np.float64)
                for piece in old[name]:
                    weight = 1.0 if piece.owner == rank or not self._mean else 1 / len(states)
                    total[piece.start : piece.stop] += weight * flat[piece.start : piece.stop]
            up, down = one.choice.up.residual_by_default, one.choice.down.residual_by_default
            holders = (self.world - 1) * up + down
            for piece in slices:
                residual = self.contexts[piece].residual
                if residual is not None:
                    weight = 1 if piece.owner == self.rank or not self._mean else self.world
                    share = total[piece.start : piece.stop] * (weight / holders)
                    residual.copy_(torch.from_numpy(share))
