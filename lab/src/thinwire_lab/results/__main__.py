"""Makes the measurements of the page Results that have no finished result for the present sources.

    python -m thinwire_lab.results --only codecs goodput

Ctrl-C keeps what is finished, and the same command continues. The tables are in FOLDER/results.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from thinwire.errors import ThinwireError
from thinwire.presentation.tables import Table
from thinwire.presentation.whole_files import write_file
from thinwire.quantities import seconds_text
from thinwire_lab.results.making import Measurement, Result, catalogue, make, stored

TITLE = "title"
"""As a key: the title of a command's table."""


def arranged(given: Measurement, tables: Sequence[Table]) -> Table:
    """Returns the measurement's columns of its commands' tables as one table."""
    needed = {*given.keys, *given.values, given.across or TITLE} - {TITLE}
    lines: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for table in tables:
        for cells in table.lines if needed <= {*table.header} else ():
            row = dict(zip(table.header, cells, strict=True)) | {TITLE: table.title or ""}
            line = lines.setdefault(tuple(row[name] for name in given.keys), {})
            for name in given.values:
                line.setdefault(row[given.across] if given.across else name, []).append(row[name])
    columns = list(dict.fromkeys(name for line in lines.values() for name in line))
    body = [[*key, *(", ".join(filter(None, line.get(name, []))) for name in columns)] for key, line in lines.items()]
    return Table([*given.keys, *columns], body, given.title, left=len(given.keys))


def section(name: str, given: Measurement, result: Result | None) -> str:
    """Returns a section in Markdown: commands, origin, table, notes."""
    parts = [f"## {given.title}", "\n".join(f"* `thinwire {command}`" for command in given.all_commands())]
    if result is None or not result.finished:
        return "\n\n".join([*parts, f"No finished result: `python -m thinwire_lab.results --only {name}` makes it."])
    table = arranged(given, result.tables)
    rule = ["---"] * table.left + ["---:"] * (len(table.header) - table.left)
    lines = "\n".join(f"|{'|'.join(cells)}|" for cells in (table.header, rule, *table.lines))
    machine = f"{result.machine.text}, Python {result.machine.python}, {result.cores} cores"
    made = f"commit {result.commit or 'unknown'}, sources {result.sources}"
    origin = [result.date, machine, made, seconds_text(result.seconds)]
    origin += [f"{', '.join(given.values)} by {given.across}"] if given.across else []
    return "\n\n".join([*parts, " · ".join(origin), lines, *result.notes])


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 after a failed command, 130 after Ctrl-C."""
    known, status = catalogue(), 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(known), metavar="NAME", choices=known)
    parser.add_argument("--list", action="store_true", help="show names and minutes on two idle cores; measure nothing")
    parser.add_argument("--folder", type=Path, default=Path("out/results"))
    args = parser.parse_args(arguments)
    paths = {name: args.folder / f"{name}.json" for name in known}
    if args.list:
        for name, given in known.items():
            result = stored(paths[name], given)
            state = "" if result is None else f"finished {result.date}" if result.finished else "begun"
            print(f"{name:14}{given.minutes:>4} min  {given.title:36}{', '.join(given.needs):18}{state}".rstrip())
        return 0
    try:
        for name in args.only:
            if (why := known[name].lacking()) is not None:
                print(f"{name}: skipped: {why}", flush=True)
                continue
            print(f"{name}: about {known[name].minutes} min on two idle cores", flush=True)
            try:
                make(known[name], paths[name])
            except ThinwireError as error:
                print(f"{name}: failed: {error}", file=sys.stderr, flush=True)
                status = 1
    except KeyboardInterrupt:
        print("interrupted: finished measurements are kept, and the same command continues", flush=True)
        status = 130
    page = args.folder / "results.md"
    sections = [section(name, given, stored(paths[name], given)) for name, given in known.items()]
    write_file(page, ("\n\n".join(["# Results", *sections]) + "\n").encode())
    print(f"wrote {page}")
    return status


if __name__ == "__main__":
    sys.exit(main())
