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
from flywheel.ragged import RaggedConfig, RaggedDiagnostics, RaggedOutput, ragged_attention

__version__ = "0.1.0"

__all__ = [
    "AttentionConfig",
    "AttentionDiagnostics",
    "AttentionOutput",
    "RaggedConfig",
    "RaggedDiagnostics",
    "RaggedOutput",
    "Rotary",
    "RotaryTables",
    "Softmax",
    "attention",
    "ragged_attention",
    "rotary_tables",
]
