"""`python -m thinwire` is `thinwire`, which asks for its libraries before it imports them."""

from thinwire.errors import ConfigError
from thinwire.extras import require

try:
    require("the command thinwire", "typer", "rich")
except ConfigError as error:
    raise SystemExit(f"error: {error}") from None

from thinwire.cli.main import run  # which imports what was just looked for

if __name__ == "__main__":
    run()
