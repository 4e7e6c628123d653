"""Softmax attention of packed sequences, on the 8-row grid."""

from flywheel.ragged.api import RaggedDiagnostics, RaggedOutput, ragged_attention
from flywheel.ragged.tiling import RaggedConfig

__all__ = ["RaggedConfig", "RaggedDiagnostics", "RaggedOutput", "ragged_attention"]
