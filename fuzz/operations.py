"""The operations that are hunted: who is attacked by default, and how a kernel is loaded by name."""

from __future__ import annotations

import dataclasses
import pkgutil
from typing import Any

ATTENTION, RAGGED, INVERSE, LAYER = "attention", "ragged", "inverse", "gdn"


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation.

    Attributes:
        name: as hunts call it.
        subject: attacked unless another is named.
        loader: `module:function` from a subject's name to the subject; it raises one of `verify`'s subject errors.
        listing: `module:function` that gives the known names.
    """

    name: str
    subject: str
    loader: str
    listing: str

    def load(self, name: str) -> Any:  # noqa: ANN401  a subject of the operation
        """A subject by name."""
        return pkgutil.resolve_name(self.loader)(name)

    def names(self) -> tuple[str, ...]:
        """The names that are known."""
        return pkgutil.resolve_name(self.listing)()


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(
            ATTENTION, "flywheel.attention", "fuzz.attention.evaluate:load_attention", "verify.subjects.registry:names"
        ),
        Operation(
            RAGGED,
            "flywheel.ragged_attention",
            "fuzz.attention.ragged:load_ragged",
            "fuzz.attention.ragged:names",
        ),
        Operation(
            LAYER, "flywheel.gdn.fused_conv1d_gdn", "fuzz.gdn.subjects:load_layer", "fuzz.gdn.subjects:layer_names"
        ),
        Operation(INVERSE, "flywheel.gdn.triangular_inverse", "fuzz.gdn.subjects:load", "fuzz.gdn.subjects:names"),
    )
}  # fmt: skip
