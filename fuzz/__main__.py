"""`python -m fuzz`."""

import sys

if __name__ == "__main__":  # worker processes import this module again, and need none of it
    from fuzz.cli import main

    sys.exit(main())
