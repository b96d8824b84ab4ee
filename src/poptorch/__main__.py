"""Run the command ``poptorch`` as ``python -m poptorch``."""

from ._cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
