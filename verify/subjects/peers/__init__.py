"""Kernels of other projects (the dependency group `peers`); each is imported when it is called, not before.

deltanet-tpu needs a jax below 0.12 and so stands in no group: `python -m verify.subjects.peers.deltanet environment`
makes an environment for it, and cases and results go through files.
"""
