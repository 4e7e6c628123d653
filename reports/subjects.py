"""Kernels by name, whatever they compute."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

from fuzz.gdn.subjects import FLYWHEEL as INVERSE
from reports.grid_gdn import FILLED, INVERSE_SUBJECT, PRECISIONS
from reports.grid_ragged import INVARIANT, RAGGED
from reports.model import OURS
from verify.subjects import gdn, registry

if TYPE_CHECKING:
    from fuzz.gdn.subjects import InverseSubject
    from verify.subjects.gdn import GdnSubject
    from verify.subjects.subject import Subject

INVERSES = {f"{INVERSE_SUBJECT}[{precision}]": precision for precision in PRECISIONS}
PACKED = {RAGGED: "verify.subjects.ours:RAGGED", INVARIANT: "verify.subjects.ours:RAGGED_INVARIANT"}


def is_ours(name: str) -> bool:
    """Whether a name is that of a kernel of ours, in any of its configurations."""
    return name.partition("[")[0] in OURS


def load(name: str) -> Subject | GdnSubject | InverseSubject:
    """The kernel of that name, or what stands at `package.module:object`.

    Raises:
        SubjectError, GdnSubjectError: no such name.
    """
    if name in INVERSES:
        return dataclasses.replace(INVERSE, name=name)
    if name in gdn.names():
        found = gdn.load(name)
        return _filled(found, name) if is_ours(name) else found
    return registry.load(PACKED.get(name, name))


def _filled(subject: GdnSubject, name: str) -> GdnSubject:
    """Our layer with every call filled up to one shape, so that one compilation serves the grid."""
    from verify.subjects.gdn_ours import run_flywheel_gdn  # noqa: PLC0415  starts JAX

    precision = name.partition("[")[2].rstrip("]")
    call = functools.partial(run_flywheel_gdn, precision=precision, buckets=FILLED)
    return dataclasses.replace(subject, call=call)
