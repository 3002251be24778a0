"""Grids with models, methods and numbers that cannot be: refused before a process is started for any of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from thinwire_lab.bench.server import ServerBench

from thinwire.errors import ConfigError
from thinwire_lab.bench.fsdp import FsdpBench
from thinwire_lab.bench.hook_cells import HookCell
from thinwire_lab.bench.updates import UpdatesBench


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: HookCell(hook="none", model="nosuch"), "unknown model 'nosuch'"),
        (lambda: HookCell(hook="none", model="resnet8", data="python-text"), "resnet8 does not train on python-text"),
        (lambda: HookCell(hook="none", lr=-1.0), "a learning rate of -1.0"),
        (lambda: HookCell(hook="none", batch=0), "a batch of 0"),
        (lambda: HookCell(hook="none", device="gpu"), "device 'gpu'; allowed are cpu, cuda, and one of several"),
        (lambda: HookCell(hook="none", device="cuda:99"), "device 'cuda:99': torch .* CUDA devices here; use cpu"),
        (lambda: FsdpBench(model="nosuch"), "unknown model 'nosuch'"),
        (lambda: FsdpBench(hooks=["hsdp:nosuch"]), "unknown codec 'nosuch'"),
        (lambda: UpdatesBench(models=["nosuch"]), "unknown model 'nosuch'"),
        (lambda: ServerBench(designs=["nosuch"]), "unknown design 'nosuch'"),
    ],
)
def test_refused_at_once(made: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made()
