"""Other people's optimizers: which file ran, what is missing, and that the rank's loop calls them as their authors do.

The files stood in for here have the same class, with the same arguments, and a step that can be told by hand.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from thinwire.bench import authors
from thinwire.bench.authors import WORKS, chosen, files, identify, load
from thinwire.bench.authors_methods import AuthorsDemo, AuthorsSparseLoCo, TorchftDiLoCo, fragments_of
from thinwire.bench.hook_cells import hook
from thinwire.bench.hooks import HooksBench
from thinwire.bench.loss_race import LossRace
from thinwire.errors import ConfigError

SPARSELOCO = """
import torch
class SparseLoCo(torch.optim.SGD):
    def __init__(self, params, lr, error_decay, top_k, chunk_size, use_quantization, quantization_bins):
        super().__init__(params, lr=lr)
        self.settings = (error_decay, top_k, chunk_size, use_quantization, quantization_bins)
"""
DEMO = """
import torch
class DeMo(torch.optim.SGD):
    def __init__(self, params, compression_decay, compression_topk, compression_chunk, **rest):
        super().__init__(params, **rest)
        self.settings = (compression_decay, compression_topk, compression_chunk)
"""


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def written(folder: Path, text: str, name: str = "theirs.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_options_are_those_of_our_designs_and_have_their_defaults() -> None:
    for name, design in (("sparseloco-authors", "sparseloco"), ("diloco-torchft", "diloco"), ("demo-authors", "demo")):
        ours = hook(design).design
        assert ours is not None and ours.local is not None
        timetable, codec, own = ours.local, ours.up.config(), hook(name).work
        assert own is not None and hook(name).period == timetable.sync_every and not hook(name).compresses
        for option, value in own.items():
            expected = timetable.sync_every if option == "h" else getattr(timetable, option, codec.get(option))
            assert value == expected, f"{name}: {option}"
    assert hook("sparseloco-authors[h=15,k=128]").work == chosen("sparseloco-authors", {"h": 15, "k": 128})


def test_what_cannot_be_is_told(tmp_path: Path) -> None:
    good = written(tmp_path, DEMO)
    for given, text in (
        ("demo-authors[h=3]", "has no option 'h'; it has k, error_scale"),
        ("demo-authors[k=1.5]", "k is 1.5; it must be a whole number of at least 1"),
        ("diloco-torchft[keep=x]", "keep='x'; it is a number of at least 0"),
    ):
        with pytest.raises(ConfigError, match=text):
            hook(given)
    for given, text in (
        ("demo", "expected NAME=PATH with a name of demo, sparseloco"),
        (f"diloco={good}", "expected NAME=PATH with a name of demo, sparseloco"),
        ("demo=/nowhere/demo.py", r"no such file; it is to be demo.py of github.com/bloc97/DeMo"),
    ):
        with pytest.raises(ConfigError, match=text):
            files([given])
    text = r"its authors' own file, .*: get src/tplr/sparseloco.py of github.com/.*--authors sparseloco=PATH"
    for bench in (HooksBench, LossRace):
        with pytest.raises(ConfigError, match=text):
            bench(models=["byte-transformer-1m"], hooks=["sparseloco-authors"], data="python-text")
    for content, text in (
        (
            "import a_library_that_is_not_here",
            "imports a_library_that_is_not_here, which is not installed: pip install",
        ),
        ("1 / 0", "cannot be imported: ZeroDivisionError"),
        ("class DEMO: ...", "has no class DeMo; 'demo-authors' needs demo.py of"),
    ):
        with pytest.raises(ConfigError, match=text):
            load("demo-authors", written(tmp_path, content, "bad.py"))


def test_results_tell_which_file_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, SPARSELOCO)
    race = LossRace(hooks=["none", "sparseloco-authors"], links=["10mbit"], files=files([f"sparseloco={path}"]))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert {cell.hook: cell.authors for cell in race.cells()} == {
        "none": None,
        "sparseloco-authors": f"theirs.py, SHA-256 {digest}",
    }
    monkeypatch.setattr(authors, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the package torchft: pip install torchft"):
        identify("diloco-torchft", {})


def test_their_outer_step_is_on_what_h_inner_steps_changed(tmp_path: Path) -> None:
    path = written(tmp_path, SPARSELOCO)
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(8.0)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    method = AuthorsSparseLoCo(model, inner, path, chosen("sparseloco-authors", {"h": 2, "outer_lr": 0.5}))
    assert method._outer.settings == (0.95, 64, 64, True, 4)
    seen = []
    for _ in range(3):
        inner.zero_grad()
        model(torch.ones(1, 2)).sum().backward()  # every gradient is 1
        method.step()
        with method.shared_weights():
            shared = model.weight[0, 0].item()
        seen.append((model.weight[0, 0].item(), shared))
    # 8 → 7 → 6; the outer rate takes half of that: 7. And on: 6, of which everybody's is still 7.
    assert seen == [(7.0, 8.0), (7.0, 7.0), (6.0, 7.0)]
    method.finish()
    method.finish()
    assert model.weight[0, 0].item() == 6.5, "a round that is under way is ended early, once"


def test_demos_step_is_theirs_alone(tmp_path: Path) -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    method = AuthorsDemo(model, optimizer, written(tmp_path, DEMO), chosen("demo-authors", {"k": 8}))
    assert type(method.optimizer).__name__ == "DeMo" and method.optimizer.param_groups[0]["lr"] == 0.25
    assert method.optimizer.settings == (0.999, 8, 64)  # type: ignore[attr-defined]  # of the class above
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    method.step()
    torch.testing.assert_close(model.weight.detach(), before - 0.25)


def test_torchfts_fragments_hold_every_parameter_once() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    fragments = fragments_of(model, 3)
    assert [each for part in fragments for each in part.parameters()] == list(model.parameters())
    assert all(list(part.parameters()) for part in fragments)


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated")  # torchft's
def test_torchft_runs_where_it_is_installed() -> None:
    if find_spec(WORKS["diloco-torchft"].where) is None:
        with pytest.raises(ConfigError, match="diloco-torchft needs torchft"):
            TorchftDiLoCo(nn.Linear(2, 1), torch.optim.SGD([torch.zeros(1)]), "127.0.0.1:1", {})
        return
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(8.0)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    options = chosen("diloco-torchft", {"h": 2, "outer_lr": 0.5, "outer_momentum": 0.0})
    method = TorchftDiLoCo(model, inner, "127.0.0.1:1", options)
    for _ in range(3):
        inner.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        method.step()
    with method.shared_weights():
        assert model.weight[0, 0].item() == 7.0
    assert model.weight[0, 0].item() == 6.0
    method.finish()
    assert model.weight[0, 0].item() == 7.0, "torchft ends no round early"
    method.close()
