"""Lemmas of Gated DeltaNet, as mathematical facts: their constants will be read from the kernel once it exists."""
