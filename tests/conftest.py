"""Which tests run, and in which order: kernels first, then long files; those of minutes only where asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
KERNELS = [ROOT / "tests" / "kernels", ROOT / "lab" / "tests" / "kernels"]
LONG = [
    ROOT / name
    for name in (
        "lab/tests/cli/test_processes.py",
        "tests/simulation/test_seeds.py",
        "tests/simulation/test_more_seeds.py",
        "lab/tests/studies/reproduce/test_reproduce.py",
        "lab/tests/codecs/test_contract.py",
        "lab/tests/bench/test_ranks.py",
        "lab/tests/jobs/test_processes.py",
        "tests/planner/test_script.py",
        "lab/tests/studies/test_grid.py",
        "tests/test_imports.py",
        "tests/designs/test_bars.py",
        "tests/hooks/ddp/test_examples.py",
        "lab/tests/bench/test_race.py",
        "tests/hooks/local/test_groups.py",
        "tests/codecs/test_hostile.py",
        "lab/tests/bench/test_hooks.py",
    )
]
"""Files of ten seconds and more, the longest first: begun late, one would keep one process busy and the other idle."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests marked `long` or `frameworks`, unless `pytest -m` names the mark; `cuda` where there is no GPU.

    The kernels' tests come first: in a fresh clone their files compile kernels of their own, and what they compiled is
    read from the cache by all that follows. Elsewhere processes that start together would compile the same ones.
    """
    places = {path: place for place, path in enumerate(LONG)}
    items.sort(
        key=lambda item: (not any(map(item.path.is_relative_to, KERNELS)), places.get(item.path, len(places)))
    )
    unasked = [mark for mark in ("long", "frameworks") if mark not in str(config.getoption("markexpr"))]
    if not torch.cuda.is_available():
        unasked.append("cuda")
    left_out = [item for item in items if any(map(item.get_closest_marker, unasked))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
