"""Enclosures: everything that a conforming device may return, as midpoint-radius arrays (docs/enclosures.md)."""
