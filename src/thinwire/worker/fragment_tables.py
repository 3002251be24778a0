"""The tensors of a fragment, sorted by how their tables travel, with what calls for many of them at once need."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from thinwire.codecs.tensors import off_host
from thinwire.codecs.ternary_batch import TernaryBatch, takes
from thinwire.codecs.ternary_device import DeviceTernary
from thinwire.worker.model import WorkerTensor
from thinwire.worker.rows import Places, Rows
from thinwire.worker.table import WorkerTable


class FragmentTables:
    """Some tensors of a model at one worker, and their tables.

    Args:
        tensors: in the model's order.

    Attributes:
        shared: their shared values, float32[n] each.
        on_host: whether these are in the host's memory; otherwise some are on GPUs.
        is_plain: whether the local values are the model's own float32 memory besides.
        places: every table, with the number of its tensor; `all` are their rows.
        ternary: those that one call of `batch` encodes or decodes; `coded` are their rows, `not_coded` those of others.
        vectors: those that travel in a message's batch, in full and in half precision.
        on_device: those on a GPU that 3LC codes, by codec, with what decodes them in one call, and may encode them.
        alone: all others.
        batch: of the ternary ones; None where there are none.
    """

    def __init__(self, tensors: Sequence[WorkerTensor]) -> None:
        self.tensors = tensors
        self.shared = [tensor.values for tensor in tensors]
        self.on_host = not any(map(off_host, self.shared))
        self.is_plain = self.on_host and all(tensor.is_plain for tensor in tensors)
        self.places: Places = [(place, table) for place, tensor in enumerate(tensors) for table in tensor.tables]
        self.ternary = [each for each in self.places if _is_ternary(each[1])]
        batched = [each for each in self.places if each[1].travels_in_batch]
        self.vectors = [[each for each in batched if each[1].is_narrow == narrow] for narrow in (False, True)]
        self.on_device = _on_device(self.places)
        coded = {id(table) for _, table in self.ternary}
        together = coded | {id(table) for _, table in batched}
        together |= {id(table) for places, _ in self.on_device for _, table in places}
        self.alone = [each for each in self.places if id(each[1]) not in together]
        self.all, self.coded = Rows(self.places, tensors), Rows(self.ternary, tensors)
        self.not_coded = Rows([each for each in self.places if id(each[1]) not in coded], tensors)
        contexts = [table.context for _, table in self.ternary if table.context is not None]
        self.batch = TernaryBatch(contexts) if contexts else None
        self._room: list[torch.Tensor] = []

    def room(self) -> list[torch.Tensor]:
        """Returns room for all tensors, float32, which whoever is called next may use again."""
        self._room = self._room or [torch.empty_like(each) for each in self.shared]
        return self._room

    def release_room(self) -> None:
        """Gives the room back to the system, where it is not needed for long."""
        self._room = []


def _is_ternary(table: WorkerTable) -> bool:
    return table.on_host and table.context is not None and table.context.on_host and takes(table.context)


def _on_device(places: Places) -> list[tuple[Places, DeviceTernary]]:
    """Returns tables on a GPU that 3LC codes, by codec, and what makes one call for all."""
    alike: dict[object, list[tuple[int, WorkerTable]]] = defaultdict(list)
    for place, table in places:
        context = table.context
        if context is not None and not context.on_host and takes(context):
            alike[context.codec, context.device].append((place, table))
    return [(some, DeviceTernary([t.context for _, t in some if t.context is not None])) for some in alike.values()]
