"""Search spaces, hunts, the campaign engine and the corpus of worst cases (`python -m fuzz`)."""

import os

# `verify.runtime.MANY_RUNS`, which must stand in the environment before `verify` is imported.
os.environ.setdefault("FLYWHEEL_MANY_RUNS", "1")
