"""`python -m thinwire` is `thinwire`."""

from thinwire.cli.main import run

if __name__ == "__main__":
    run()
