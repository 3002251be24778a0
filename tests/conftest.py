"""Which tests run, and in which order: kernels first, then long files; those of minutes only where asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

LONG = [
    Path(name)
    for name in (
        "cli/test_processes.py",
        "simulation/test_seeds.py",
        "simulation/test_more_seeds.py",
        "studies/reproduce/test_reproduce.py",
        "codecs/test_contract.py",
        "bench/test_ranks.py",
        "jobs/test_processes.py",
        "planner/test_script.py",
        "test_imports.py",
        "designs/test_bars.py",
        "hooks/test_examples.py",
        "bench/test_race.py",
        "hooks/local/test_groups.py",
        "codecs/test_hostile.py",
        "bench/test_hooks.py",
    )
]
"""Files of ten seconds and more, of the product or of the lab, the longest first: begun late, one would keep one
process busy and the other idle."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests marked `long` or `frameworks`, unless `pytest -m` names the mark; `cuda` where there is no GPU.

    The kernels' tests come first: in a fresh clone their files compile kernels of their own, and what they compiled is
    read from the cache by all that follows. Elsewhere processes that start together would compile the same ones.
    """
    places = {path: place for place, path in enumerate(LONG)}

    def order(item: pytest.Item) -> tuple[bool, int]:
        inside = Path(str(item.path).rpartition("/tests/")[2])
        return not inside.is_relative_to("kernels"), places.get(inside, len(places))

    items.sort(key=order)
    unasked = [mark for mark in ("long", "frameworks") if mark not in str(config.getoption("markexpr"))]
    if not torch.cuda.is_available():
        unasked.append("cuda")
    left_out = [item for item in items if any(map(item.get_closest_marker, unasked))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
