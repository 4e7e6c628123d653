"""Emulation of arithmetic: a function's jaxpr evaluated exactly, as a device may, or with random roundings.

`python -m verify.emulate` says which operation loses the digits (docs/emulation.md).
"""
