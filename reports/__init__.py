"""Records to figures to pages: `python -m reports build` measures the kernels and writes one HTML page about them."""

import verify  # noqa: F401  # pyright: ignore[reportUnusedImport]  configures JAX before anything here imports it
