"""``python -m poptorch``: the command ``poptorch``."""

from ._cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
