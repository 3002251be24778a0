"""Which tests run, and in which order: kernels first; those that take minutes each only where they are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

KERNELS = Path(__file__).parent / "kernels"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests marked `long` or `frameworks`, unless `pytest -m` names the mark.

    The kernels' tests come first: in a fresh clone their files compile kernels of their own, and what they compiled is
    read from the cache by all that follows. Elsewhere processes that start together would compile the same ones.
    """
    items.sort(key=lambda item: not item.path.is_relative_to(KERNELS))
    unasked = [mark for mark in ("long", "frameworks") if mark not in str(config.getoption("markexpr"))]
    left_out = [item for item in items if any(map(item.get_closest_marker, unasked))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
