"""Softmax attention with a static anchor."""

from flywheel.attention.api import AttentionDiagnostics, AttentionOutput, attention
from flywheel.attention.checks import Softmax
from flywheel.attention.rotary import Rotary, RotaryTables, rotary_tables
from flywheel.attention.tiling import AttentionConfig

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
