"""Exact gradients of attention: the definition, three oracles, and the check that they can be trusted."""
