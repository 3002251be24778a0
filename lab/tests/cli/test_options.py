"""Commands with options from the fields of a dataclass, and lists of names."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from thinwire.errors import ConfigError
from thinwire_lab.bench import options as bench
from thinwire_lab.chaos import faults as chaos
from thinwire_lab.cli.options import OPTIONS, takes
from thinwire_lab.jobs.job import Job
from thinwire_lab.studies.options import ComparisonOptions


def test_takes_makes_an_option_for_every_field() -> None:
    kinds = [ComparisonOptions, *(each for each in (vars(bench) | vars(chaos)).values() if is_dataclass(each))]
    jobs = {field.name for field in fields(Job)}
    assert jobs <= OPTIONS.keys() <= jobs | {field.name for kind in kinds for field in fields(kind)}


def run(*arguments: str) -> tuple[Any, Job | None]:
    app, seen = typer.Typer(), list[Job]()

    @app.command()
    @takes(Job, without=("servers",))
    def command(job: Job, name: Annotated[str, typer.Option(help="Needed.")], note: str = "") -> None:
        """What it does."""
        seen.append(job)

    result = CliRunner().invoke(app, list(arguments))
    return result, seen[0] if seen else None


def test_takes_passes_the_options_as_an_object() -> None:
    _, job = run("--name", "x", "--design", "fp32", "--lr", "0.5", "--servers-on-workers")
    assert job == Job(design="fp32", lr=0.5, servers_on_workers=True)
    _, job = run("--name", "x")
    assert job == Job()


def test_takes_reports_impossible_and_missing_options() -> None:
    result, _ = run("--name", "x", "--steps", "5", "--seconds", "5")
    assert isinstance(result.exception, ConfigError)
    result, _ = run("--design", "fp32")
    assert result.exit_code == 2


@dataclass(frozen=True, kw_only=True)
class Grid:
    links: tuple[str, ...] = ("none", "1mbit")
    hooks: tuple[str, ...] = ("none", "3lc[s=1.0]")
    rounds: int = 3


def test_takes_lists_with_commas_and_repeated_options() -> None:
    app, seen = typer.Typer(), list[Grid]()

    @app.command()
    @takes(Grid, rounds=Annotated[int, typer.Option("--runs")])
    def command(grid: Grid) -> None:
        seen.append(grid)

    for arguments in ([], ["--links", "a, b[c,d]", "--hook", "x[y,z]", "--hook", "w", "--runs", "7"]):
        assert CliRunner().invoke(app, arguments).exit_code == 0
    assert seen == [Grid(), Grid(links=("a", "b[c,d]"), hooks=("x[y,z]", "w"), rounds=7)]


def test_takes_field_without_an_option_raises_type_error() -> None:
    @dataclass
    class Strange:
        colour: str = "red"

    with pytest.raises(TypeError, match=r"Strange\.colour has no option"):
        takes(Strange)(lambda strange: None)
