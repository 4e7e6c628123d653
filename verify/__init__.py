"""Oracles, error measures, verdicts and tests for attention kernels; importing it configures JAX (`verify.runtime`)."""

from verify.runtime import configure

configure()
