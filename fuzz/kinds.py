"""Kinds of rounds: how the cases of one turn of a hunt come about."""

RANDOM, TARGET, EVOLVE, BITS, GRADIENT, CLIMB = KINDS = ("random", "target", "evolve", "bits", "gradient", "climb")
"""Draws alone; draws and Hypothesis' climber; varied elites; local search from elites, by bit flips, along a
gradient, or both."""

DRAWN = (RANDOM, TARGET)
LOCAL = (BITS, GRADIENT, CLIMB)
