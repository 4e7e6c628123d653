"""What stands at a name: an object of some kind, or a function to make one of."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def find[T](name: str, kind: type[T], known: Mapping[str, str], error: type[Exception]) -> tuple[str, object]:
    """The place `package.module:object` that a name means, and what stands there: a `kind`, or something callable.

    Raises:
        error: the name is neither known nor a place, or nothing of that sort stands there.
    """
    path = known.get(name, name)
    module, colon, attribute = path.partition(":")
    if not (module and colon and attribute):
        message = f"subject must be package.module:object or one of {', '.join(known)}; got {name!r}"
        raise error(message)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as cause:
        message = f"subject {name!r} cannot be loaded: {cause}"
        raise error(message) from cause
    if not isinstance(found, kind) and not callable(found):
        message = f"subject {name!r} must be {_article(kind)} or a function, got {type(found).__name__}"
        raise error(message)
    return path, found


def _article(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
