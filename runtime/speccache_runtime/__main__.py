"""`python -m speccache_runtime` and the `speccache-runtime` command."""

from speccache_runtime.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
