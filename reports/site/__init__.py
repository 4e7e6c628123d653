"""A static site of runs: permanent pages, history, and what changed between any two."""
