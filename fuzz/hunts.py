"""The hunts by name: a search space, the shapes it runs at, and the judge of one case."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from fuzz.attention.buckets import BUCKETS, FEATURE_BUCKETS, Bucket
from fuzz.attention.space import anchor_cases

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hypothesis.strategies import SearchStrategy

    from verify.attention.cases import AttentionCase


class HuntError(ValueError):
    """A hunt or a shape bucket that does not exist."""


@dataclasses.dataclass(frozen=True)
class Hunt:
    """One hunt.

    Attributes:
        name: what the command line calls it.
        summary: what it is after.
        buckets: shapes by name.
        cases: the search space over some of these shapes.
        evaluator: `module:function` of the judge of one case; by name, since it starts JAX, which only workers need.
    """

    name: str
    summary: str
    buckets: Mapping[str, Bucket]
    cases: Callable[[Sequence[Bucket]], SearchStrategy[AttentionCase]]
    evaluator: str

    def chosen(self, names: Sequence[str]) -> tuple[Bucket, ...]:
        """Buckets by name; none named means all.

        Raises:
            HuntError: there is no such bucket.
        """
        unknown = [name for name in names if name not in self.buckets]
        if unknown:
            message = f"hunt {self.name} has no bucket {', '.join(unknown)}; it has {', '.join(self.buckets)}"
            raise HuntError(message)
        return tuple(self.buckets[name] for name in names or self.buckets)


HUNTS = {
    hunt.name: hunt
    for hunt in (
        Hunt(
            "anchor",
            "static-anchor softmax of dense attention: jumps around every limit in every place, |v| up to the largest "
            "BF16, equal, huge and opposite logits, repeated and near-duplicate keys",
            BUCKETS,
            anchor_cases,
            "fuzz.attention.evaluate:evaluate",
        ),
        Hunt(
            "features",
            "the same against windows, soft caps, sinks, segment ids and wider values: anchors that are chosen late, "
            "rows without a key, sinks beyond the check's limit",
            FEATURE_BUCKETS,
            anchor_cases,
            "fuzz.attention.evaluate:evaluate",
        ),
    )
}


def find(name: str) -> Hunt:
    """A hunt by name.

    Raises:
        HuntError: there is no such hunt.
    """
    if name not in HUNTS:
        message = f"there is no hunt {name!r}; there are {', '.join(HUNTS)}"
        raise HuntError(message)
    return HUNTS[name]
