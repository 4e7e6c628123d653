"""Hunts for dense attention: the search space (`space`) and what one case is worth (`evaluate`)."""
