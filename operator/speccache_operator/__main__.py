"""`speccache-operator run`: settings, logging, then the process."""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from speccache_operator import app, logs
from speccache_operator.errors import SettingsError
from speccache_operator.process import settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; answers the exit code: 0 stopped, 1 could not go on, 2 wrong settings."""
    parser = argparse.ArgumentParser(prog="speccache-operator", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    settings.add_arguments(commands.add_parser("run", help="reconcile SpecCacheDeployments until stopped"))
    parsed = parser.parse_args(arguments)
    try:
        loaded = settings.load(parsed)
        logs.configure(loaded.log_level)
        return asyncio.run(app.run(loaded))
    except SettingsError as error:
        sys.stderr.write(f"speccache-operator: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
