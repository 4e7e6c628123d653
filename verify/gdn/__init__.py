"""Gated DeltaNet: the exact function, oracles with proved errors, the kernels' contract, and the verdict."""
