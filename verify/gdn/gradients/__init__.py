"""Gradients of the gated delta rule: their definition, and oracles with proved errors."""
