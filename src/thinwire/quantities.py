"""Rates, times and sizes as text for people."""

from __future__ import annotations


def rate_text(bps: float, digits: int = 3) -> str:
    """Returns bits per second with `digits` significant digits.

    >>> [rate_text(each) for each in (340e6, 1.234e9, 5.5e5)], rate_text(1.234e9, 2)
    (['340 Mbit/s', '1.23 Gbit/s', '550 kbit/s'], '1.2 Gbit/s')
    """
    factor, unit = (1e9, "Gbit/s") if bps >= 1e9 else (1e6, "Mbit/s") if bps >= 1e6 else (1e3, "kbit/s")
    return f"{float(f'{bps / factor:.{digits}g}'):g} {unit}"


def seconds_text(seconds: float) -> str:
    """Returns seconds in a suitable unit, with three significant digits: minutes from two on, and hours from two on.

    >>> [seconds_text(each) for each in (12.0, 0.0123, 4.2e-05, 0.9997, 119.97, 7260.0)]
    ['12 s', '12.3 ms', '42 µs', '1 s', '2 min', '2.02 h']
    """
    seconds = float(f"{seconds:.3g}")  # before a unit is chosen
    units = (("h", 3600.0, 7200.0), ("min", 60.0, 120.0), ("s", 1.0, 1.0), ("ms", 1e-3, 1e-3))
    unit, scale = next(((unit, scale) for unit, scale, least in units if seconds >= least), ("µs", 1e-6))
    return f"{float(f'{seconds / scale:.3g}'):g} {unit}"


def ms_text(seconds: float) -> str:
    """Returns seconds as milliseconds with three significant digits, for columns of times.

    >>> [ms_text(each) for each in (0.0093712, 2.774, 5.5e-5)]
    ['9.37 ms', '2770 ms', '0.055 ms']
    """
    return f"{float(f'{1e3 * seconds:.3g}'):g} ms"


def moment_text(clock: int, steps: int) -> str:
    """Returns a training's position as text: a step if every step has an exchange, else an exchange.

    Args:
        clock: number of exchanges so far.
        steps: number of steps from one exchange to the next.

    >>> moment_text(1500, 1), moment_text(15, 4)
    ('step 1,500', 'exchange 15 (one in 4 steps)')
    """
    return f"step {clock:,}" if steps == 1 else f"exchange {clock:,} (one in {steps} steps)"


def nbytes_text(nbytes: float) -> str:
    """Returns a number of bytes with three significant digits.

    >>> nbytes_text(1234567), nbytes_text(999_700), nbytes_text(2.5), nbytes_text(float("nan"))
    ('1.23 MB', '1 MB', '2 B', 'nan B')
    """
    if not nbytes >= 999.5:  # NaN as well
        return f"{nbytes:.0f} B"
    nbytes = float(f"{nbytes:.3g}")  # before a unit is chosen: 999,700 bytes are 1 MB, and not 1e+03 kB
    return next(f"{nbytes / scale:g} {unit}" for unit, scale in _SIZES if nbytes >= scale)


_SIZES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def counted(count: int, what: str) -> str:
    """Returns a number and its noun, singular or plural.

    >>> counted(1, "worker"), counted(1024, "worker")
    ('1 worker', '1,024 workers')
    """
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def number_text(value: float | None, form: str = "g", unit: str = "") -> str:
    """Returns a number as `format` writes it, followed by its unit; – for None.

    >>> number_text(1.25), number_text(0.5, ".0%"), number_text(1.25, ".1f", "×"), number_text(None, unit="×")
    ('1.25', '50%', '1.2×', '–')
    """
    return "–" if value is None else f"{value:{form}}{unit}"


MAX_TEXT = 2000
"""The most characters of a peer's text: the answer to a large message must not be larger than the message."""


def plain_text(text: str) -> str:
    """Returns a peer's text in printable form: one line of printable characters, shortened if it is long.

    >>> plain_text("no\\nsuch \\x1b[31mfile"), len(plain_text("x" * 9000))
    ('no such ?[31mfile', 2002)
    """
    cut = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} …"
    if cut.isprintable():
        return cut
    return "".join(each if each.isprintable() else " " if each.isspace() else "?" for each in cut)
