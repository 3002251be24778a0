"""Opening a page in headless Chromium, without a driver: what the page then is, and what it told the console."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
MISSING = "chromium is not installed: apt-get install chromium"


@dataclass(frozen=True)
class Opened:
    """The document after its scripts have run, and the lines of the console."""

    html: str
    console: list[str]


def open_page(page: Path, profile: Path) -> Opened:
    """Opens a local page; `profile` is a folder for the browser's own files."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"]
    budget = ["--virtual-time-budget=20000", "--timeout=60000", f"--user-data-dir={profile}"]
    command = [CHROMIUM, *flags, *budget, "--dump-dom", page.resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return Opened(html=done.stdout, console=re.findall(r"CONSOLE.*", done.stderr))
