"""Which tests run, and in which order: kernels first, then long files; those of minutes only where asked for.

And how processes begin that tests do not start themselves: most are forks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
KERNELS = TESTS / "kernels"
LONG = [
    TESTS / name
    for name in (
        "cli/test_processes.py",
        "simulation/test_seeds.py",
        "simulation/test_more_seeds.py",
        "studies/reproduce/test_reproduce.py",
        "jobs/test_processes.py",
        "planner/test_script.py",
        "studies/test_grid.py",
        "test_imports.py",
        "designs/test_bars.py",
        "hooks/test_examples.py",
        "jobs/test_forks.py",
        "bench/test_loss_race.py",
        "hooks/local/test_groups.py",
        "codecs/test_hostile.py",
        "bench/test_hooks.py",
    )
]
"""Files of ten seconds and more, the longest first: begun late, one would keep one process busy and the other idle."""
FORKED = [TESTS / name for name in ("bench", "cli", "jobs", "studies")]
PROGRAMS = [TESTS / name for name in ("bench/test_updates.py", "jobs/test_forks.py")]
"""Of those, files whose processes are programs: Python 3.11 does not know the number of a fork's first thread, by which
`bench updates` counts; and what forks do is held against what programs do."""


@pytest.fixture(autouse=True, scope="module")
def forks_for_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """What an engine would start as a program is a fork: a program takes three seconds for its imports alone.

    A fork has the same command line and runs it from its beginning; what only a benchmark's role imports, it still has
    to. That both come to the same bits, `jobs/test_forks.py` says; tests of the command start programs by themselves.
    """
    with pytest.MonkeyPatch.context() as patch:
        if any(map(request.path.is_relative_to, FORKED)) and request.path not in PROGRAMS:
            from thinwire_lab.engines import local
            from thinwire_lab.jobs.forks import forks

            patch.setattr(local, "Programs", forks)
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests marked `long` or `frameworks`, unless `pytest -m` names the mark; `cuda` where there is no GPU.

    The kernels' tests come first: in a fresh clone their files compile kernels of their own, and what they compiled is
    read from the cache by all that follows. Elsewhere processes that start together would compile the same ones.
    """
    places = {path: place for place, path in enumerate(LONG)}
    items.sort(key=lambda item: (not item.path.is_relative_to(KERNELS), places.get(item.path, len(places))))
    unasked = [mark for mark in ("long", "frameworks") if mark not in str(config.getoption("markexpr"))]
    if not torch.cuda.is_available():
        unasked.append("cuda")
    left_out = [item for item in items if any(map(item.get_closest_marker, unasked))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
