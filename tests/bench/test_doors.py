"""The doors of `bench doors`: which there are, and what a row says.

`make test-frameworks` opens them: `bench doors` runs each script four times, and fails where one is shut.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from thinwire.bench import harness
from thinwire.bench.doors import DOORS, Door, DoorRun, DoorsBench, Ended, marked, train, unmarked
from thinwire.errors import ConfigError, EngineError
from thinwire.jobs.results import Results

EXAMPLES = Path(__file__).parents[2] / "examples" / "doors"


def bench(*names: str) -> DoorsBench:
    return DoorsBench(doors=names, examples=EXAMPLES)


def test_doors_are_chosen_by_name_and_need_their_scripts(tmp_path: Path) -> None:
    assert [door.name for door in bench("HSDP", "DDP").cells()] == ["DDP", "HSDP"]
    assert bench().cells() == list(DOORS)
    with pytest.raises(ConfigError, match="no door is called Horovod; there are DDP, torchrun elastic, FSDP2"):
        bench("Horovod")
    with pytest.raises(ConfigError, match="run this in a checkout of it, or say where they are with --examples"):
        DoorsBench(examples=tmp_path)


def test_every_script_has_at_most_three_lines_for_thinwire(tmp_path: Path) -> None:
    for script in {door.script for door in DOORS}:
        assert 2 <= marked(EXAMPLES / script) <= 3, script
        unmarked(EXAMPLES, script, tmp_path / script)
        text = (tmp_path / script / script).read_text()
        assert "thinwire" not in text and compile(text, script, "exec"), script
    assert {path.name for path in EXAMPLES.glob("with_*.py")} == {door.script for door in DOORS}
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "task.py").touch()
    (hidden / "one.py").write_text("from thinwire.hooks import ddp\n")
    with pytest.raises(EngineError, match=r"one.py has a line of thinwire's without the mark .*: from thinwire.hooks"):
        unmarked(hidden, "one.py", tmp_path / "out")


def test_a_door_that_is_not_installed_says_which_command_is_missing() -> None:
    door = Door("Horovod", "with_horovod.py", needs=("no_such_module",), extra="horovod")
    run = bench().measure(door, {}, lambda text: None)
    assert run == DoorRun(missing="pip install '.[horovod]' in a checkout of thinwire") and not bench().failed(run)
    measured = {door: [run]}
    assert bench().notes(measured) == ["Horovod: pip install '.[horovod]' in a checkout of thinwire"]
    assert bench().tables(measured)[0].lines == [["Horovod", "not installed", *["–"] * 5]]


def test_what_is_stored_is_not_run_again_unless_it_failed_or_was_not_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    good = DoorRun(replicas_equal=True, residuals_survive=True, changed_lines=2, loss=0.5, plain_loss=0.25)
    doors = [Door(name, "with_ddp.py", arguments=("--backend", "x")) for name in ("good", "absent", "broken")]
    first = {"good": good, "absent": DoorRun(missing="pip install it"), "broken": DoorRun(error="died")}
    opened: list[str] = []

    def again(found: dict[str, DoorRun]) -> list[str]:
        def measure(self: DoorsBench, cell: Door, *_: object) -> DoorRun:
            opened.append(cell.name)
            return found[cell.name]

        monkeypatch.setattr(DoorsBench, "measure", measure)
        opened.clear()
        harness.run(bench(), Results(tmp_path / "doors.json", [DoorRun]), {})
        return list(opened)

    monkeypatch.setattr(DoorsBench, "cells", lambda self: doors)
    assert again(first) == ["good", "absent", "broken"]
    assert again(dict.fromkeys(first, good)) == ["absent", "broken"], "it is installed now"
    assert again({}) == []


def test_another_script_under_the_same_name_is_run_again(tmp_path: Path) -> None:
    for name in ("task.py", *{door.script for door in DOORS}):
        (tmp_path / name).write_bytes((EXAMPLES / name).read_bytes())
    own = DoorsBench(examples=tmp_path)
    keys = {door.name: own.key(door, 0) for door in DOORS}
    assert keys == {door.name: bench().key(door, 0) for door in DOORS}, "the same scripts elsewhere are the same"
    (tmp_path / "with_peft.py").write_text("changed")
    assert [door.name for door in DOORS if own.key(door, 0) != keys[door.name]] == ["PEFT"]
    (tmp_path / "task.py").write_text("changed")
    assert all(own.key(door, 0) != keys[door.name] for door in DOORS), "all of them import it"
    (tmp_path / "with_peft.py").unlink()
    with pytest.raises(ConfigError, match=r"has no with_peft\.py"):
        DoorsBench(examples=tmp_path)
    assert DoorsBench(doors=["DDP"], examples=tmp_path).cells()


def test_a_table_says_what_went_wrong() -> None:
    door = DOORS[0]
    good = DoorRun(replicas_equal=True, residuals_survive=True, changed_lines=2, loss=0.5, plain_loss=0.25)
    lost = DoorRun(replicas_equal=True, residuals_survive=False, changed_lines=2, loss=0.5, plain_loss=0.25)
    dead = DoorRun(error="exit status 1", changed_lines=2)
    for run, failed, line in (
        (good, False, ["DDP", "yes", "yes", "yes", "2", "0.5", "0.25"]),
        (lost, True, ["DDP", "yes", "yes", "NO", "2", "0.5", "0.25"]),
        (dead, True, ["DDP", "NO", "–", "–", "2", "–", "–"]),
    ):
        assert bench().failed(run) == failed
        assert bench().tables({door: [run]})[0].lines == [line]
    assert bench().line(door, dead) == "DDP: exit status 1" and bench().line(door, good) is None


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("door", [door for door in DOORS if not door.needs], ids=str)
def test_the_doors_of_torch_alone_are_open(door: Door) -> None:
    run = bench().measure(door, {}, lambda text: None)
    print(bench().tables({door: [run]})[0].lines[0])
    assert not run.error, run.error
    assert run.replicas_equal and run.residuals_survive
    assert run.loss is not None and run.plain_loss is not None
    assert run.loss < 1.36 and run.plain_loss < 1.36, "1.39 is a guess among four classes"


@pytest.mark.frameworks
def test_every_framework_is_installed_here() -> None:
    """`make test-frameworks` runs `bench doors` next, which says so where one is not, and goes on."""
    assert [door.missing for door in DOORS if door.missing] == []


@pytest.mark.frameworks
@pytest.mark.timeout(1500)
def test_without_its_residuals_a_run_goes_on_to_other_weights(tmp_path: Path) -> None:
    """So the table's third column can say no."""
    ended: list[Ended] = []
    for residual in (1.0, 0.0):
        folder = tmp_path / str(residual)
        train(DOORS[0], EXAMPLES, folder, 1)
        for path in folder.glob("epoch-0/rank*.pt"):
            saved = torch.load(path, weights_only=True)
            [part] = saved["thinwire"]["ranks"].values()
            assert any(bool(kept.any()) for kept in part["residuals"].values())
            for kept in part["residuals"].values():
                kept.mul_(residual)
            torch.save(saved, path)
        ended.append(train(DOORS[0], EXAMPLES, folder, 2))
    assert ended[0].weights != ended[1].weights
