"""`python -m thinwire` is `thinwire`, which asks for its libraries before it imports them."""

import sys

from thinwire.errors import ConfigError
from thinwire.extras import require

try:
    require("the command thinwire", "typer", "rich")
except ConfigError as error:  # told as `cli.main` tells all others
    sys.stderr.write(f"error: {error}\n")
    sys.exit(2)

from thinwire.cli.main import run  # which imports what was just looked for

if __name__ == "__main__":
    run()
