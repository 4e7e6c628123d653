"""The lemmas of static-anchor attention, by topic."""
