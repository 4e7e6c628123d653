"""Rotary position embedding: the exact function, three oracles, the contract of an FP32 kernel, and a health check."""
