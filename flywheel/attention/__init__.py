"""Softmax attention with a static anchor."""

from flywheel.attention.api import AttentionDiagnostics, AttentionOutput, attention
from flywheel.attention.tiling import AttentionConfig

__all__ = ["AttentionConfig", "AttentionDiagnostics", "AttentionOutput", "attention"]
