"""`python -m reports`."""

import sys

if __name__ == "__main__":  # worker processes import this module again, and need none of it
    from reports.cli import main

    sys.exit(main())
