"""Gated DeltaNet: the fused layer, and the chunk's triangular inverse alone."""

from flywheel.gdn.api import GdnOutput, fused_conv1d_gdn, triangular_inverse

__all__ = ["GdnOutput", "fused_conv1d_gdn", "triangular_inverse"]
