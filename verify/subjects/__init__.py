"""Attention kernels under judgement: one interface for ours, for others' and for yours (docs/judge-your-kernel.md)."""

from verify.subjects.arithmetic import Arithmetic
from verify.subjects.registry import SubjectError, load, names
from verify.subjects.subject import EVERYWHERE, FINITE, Domain, Features, Subject, subject

__all__ = [
    "EVERYWHERE",
    "FINITE",
    "Arithmetic",
    "Domain",
    "Features",
    "Subject",
    "SubjectError",
    "load",
    "names",
    "subject",
]
