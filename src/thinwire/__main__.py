"""`python -m thinwire` is `thinwire`, which checks for its libraries before it imports them."""

import sys

from thinwire.errors import ConfigError
from thinwire.extras import require

try:
    require("the command thinwire", "typer", "rich")
except ConfigError as error:  # printed as `cli.main` prints all others
    sys.stderr.write(f"error: {error}\n")
    sys.exit(2)

from thinwire.cli.main import run  # imports the libraries just checked

if __name__ == "__main__":
    run()
