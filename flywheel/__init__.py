"""Flywheel: Pallas attention kernels for TPU, each with a written numerical contract."""

# The name `attention` is both the function and the package of its family; callers want the function.
from flywheel.attention import (
    AttentionConfig,
    AttentionDiagnostics,
    AttentionOutput,
    Rotary,
    RotaryTables,
    Softmax,
    attention,
    rotary_tables,
)

__version__ = "0.1.0"

__all__ = [
    "AttentionConfig",
    "AttentionDiagnostics",
    "AttentionOutput",
    "Rotary",
    "RotaryTables",
    "Softmax",
    "attention",
    "rotary_tables",
]
