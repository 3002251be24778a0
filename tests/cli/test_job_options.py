"""A job's options on a command line: every field has one, and its default."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

import typer
from typer.testing import CliRunner

from thinwire.cli.job_options import OPTIONS, takes_job
from thinwire.errors import ConfigError
from thinwire.jobs.job import Job


def test_every_field_of_a_job_has_an_option() -> None:
    assert OPTIONS.keys() == {field.name for field in fields(Job)}


def run(*arguments: str) -> tuple[Any, Job | None]:
    app, seen = typer.Typer(), list[Job]()

    @app.command()
    @takes_job(without=("servers",))
    def command(job: Job, name: Annotated[str, typer.Option(help="Needed.")], note: str = "") -> None:
        """What it does."""
        seen.append(job)

    result = CliRunner().invoke(app, list(arguments))
    return result, seen[0] if seen else None


def test_a_command_is_given_the_job_that_was_asked_for() -> None:
    _, job = run("--name", "x", "--design", "fp32", "--lr", "0.5", "--servers-on-workers")
    assert job == Job(design="fp32", lr=0.5, servers_on_workers=True)
    _, job = run("--name", "x")
    assert job == Job()


def test_help_shows_the_commands_text_and_the_options() -> None:
    result, job = run("--help")
    assert job is None and result.exit_code == 0
    for text in ("What it does.", "--name", "--design", "--transmission"):
        assert text in result.output
    assert "--servers " not in result.output


def test_a_job_that_cannot_be_and_an_option_that_is_missing() -> None:
    result, _ = run("--name", "x", "--steps", "5", "--seconds", "5")
    assert isinstance(result.exception, ConfigError)
    result, _ = run("--design", "fp32")
    assert result.exit_code == 2
