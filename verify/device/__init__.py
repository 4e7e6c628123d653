"""Measuring the machine this process runs on, and which of the device models (`verify.devices`) describes it."""
