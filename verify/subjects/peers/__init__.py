"""Kernels of other projects (the dependency group `peers`); each is imported when it is called, not before.

deltanet-tpu is no subject: it computes the gated delta rule alone, and needs a jax below 0.12.
"""
