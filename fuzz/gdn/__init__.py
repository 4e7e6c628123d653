"""Hunts for Gated DeltaNet: the chunk's triangular inverse, and the layer."""
