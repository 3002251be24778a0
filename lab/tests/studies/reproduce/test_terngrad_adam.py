"""Table 1 trains CifarNet in the paper's proportions, on CIFAR-10 if installed, and names its data."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from lab.tests.workloads.test_images import write_cifar
from thinwire_lab.studies.reproduce.entry import Scale
from thinwire_lab.studies.reproduce.terngrad_training import ENTRIES, FLOATING, TERNARY
from thinwire_lab.workloads import data as registry

SCALES: tuple[Scale, ...] = ("quick", "full")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of downloads, with nothing in it, and nothing elsewhere."""
    monkeypatch.setattr(registry, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(registry, "SYSTEM_FOLDER", tmp_path / "system")
    return tmp_path


def test_adam_cells_have_the_papers_batches_and_steps(cache: Path) -> None:
    write_cifar(cache / "cifar10")
    for scale in SCALES:
        cells = ENTRIES[-1].cells(scale)
        assert [(cell.design, cell.workers, cell.workers * (cell.batch or 0)) for cell in cells] == [
            *((FLOATING, 2, 128), (TERNARY, 2, 128)),
            *((FLOATING, 16, 2048), (TERNARY, 16, 2048)),
        ]
        small, large = cells[0].steps, cells[2].steps
        assert [cell.steps for cell in cells] == [small, small, large, large] and small == 16 * large
        for cell in cells:
            job = cell.job().recipe()
            assert (job.optimizer, job.lr, job.schedule, job.weight_decay) == ("Adam", 2e-4, "constant", 0.004)
            assert job.dropout == 0.0


def test_cifarnet_trains_on_cifar10_with_two_workers_and_ternary_gradients(cache: Path) -> None:
    write_cifar(cache / "cifar10", records=4)
    cell = msgspec.structs.replace(ENTRIES[-1].cells("quick")[1], batch=2, steps=2)
    assert (cell.model, cell.data, cell.design) == ("cifarnet", "cifar10[crop=24]", TERNARY)
    first, again = (cell.run(lambda *_: None) for _ in range(2))
    assert first.history.losses == again.history.losses
    assert cell.job().recipe().augment
    # The last layer is ternary too, and the smallest tensor has a scale besides.
    assert 1.6 <= first.bits_push < 2.1 and first.batch == 2
