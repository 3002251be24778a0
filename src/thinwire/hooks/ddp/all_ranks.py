"""The states of all ranks as one, for programs that save only on rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load, save

from thinwire.hooks.exchange.saved import merge
from thinwire.hooks.exchange.state import ExchangeState
from thinwire.runtime.peers import gather_at_first


class AllRanks:
    """The state of the hook on all ranks, as one object with `state_dict` and `load_state_dict`.

    Give it to a framework that calls `state_dict()` on every rank and writes only rank 0's, as Accelerate and Lightning
    do. If every rank writes its own file, save the state itself, which sends no messages.

    Args:
        state: the result of `ddp.compress` or `fsdp.compress`.

    Example::

        accelerator.register_for_checkpointing(ddp.AllRanks(state))
    """

    def __init__(self, state: ExchangeState) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of all ranks on rank 0, and its own on every other rank; all ranks call it together.

        Rank 0 needs 4 bytes for every rank and compressed value.

        Raises:
            TransportError: not every rank called it in time.
        """
        own = self.state.state_dict()
        if self.state.world_size == 1:
            return own
        own_part = own["ranks"][str(self.state.rank)]
        kinds = [kind for kind in own_part if kind != "auto"]
        flat = {f"{kind}/{name}": tensor for kind in kinds for name, tensor in own_part[kind].items()}
        flat["auto"] = torch.tensor(list(own_part["auto"].encode()), dtype=torch.uint8)  # a text
        states = []
        for rank, data in enumerate(gather_at_first(self.state.everyone, save(flat))):
            found = load(data)
            part: dict[str, Any] = {"auto": bytes(found.pop("auto").tolist()).decode(), **{kind: {} for kind in kinds}}
            for key, tensor in found.items():
                kind, _, name = key.partition("/")
                part[kind][name] = tensor
            states.append({**own, "ranks": {str(rank): part}})
        return merge(states) if states else own

    def load_state_dict(self, state: Mapping[str, Any]) -> str:
        """Loads rank 0's saved states, on every rank of any number of ranks. See `ExchangeState.load_state_dict`."""
        return self.state.load_state_dict(state)
