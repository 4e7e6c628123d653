"""Case files of this folder's operations: a flat object of the case's fields, with the digest of its bits."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from verify.attention.cases import CaseError

if TYPE_CHECKING:
    from collections.abc import Callable


def write(case: Any, form: str, sha256: str) -> dict[str, Any]:  # noqa: ANN401  a dataclass with a name
    """A JSON object that `read` reads back; defaults are left out."""
    body: dict[str, Any] = {"format": form, "name": case.name}
    for field in dataclasses.fields(case):
        value = getattr(case, field.name)
        if field.name != "name" and value != field.default:
            body[field.name] = list(value) if isinstance(value, tuple) else value
    body["sha256"] = sha256
    return body


def read[T](kind: Callable[..., T], form: str, body: dict[str, Any], digest: Callable[[T], str]) -> T:
    """Read a case, and check its bits.

    Raises:
        CaseError: wrong format, unknown fields, values that nothing can be built of, or other bits.
    """
    if body.get("format") != form:
        message = f"format must be {form}, got {body.get('format')!r}"
        raise CaseError(message)
    given = {key: value for key, value in body.items() if key not in ("format", "sha256", "versions")}
    try:
        case = kind(**{key: tuple(x) if isinstance(x, list) else x for key, x in given.items()})
        found = digest(case)
    except (TypeError, ValueError, KeyError, IndexError) as error:
        message = f"case {body.get('name')!r} cannot be built: {error}"
        raise CaseError(message) from error
    if "sha256" in body and body["sha256"] != found:
        message = (
            f"case {body.get('name')!r} builds other bits than it was written with: {found} instead of {body['sha256']}"
        )
        raise CaseError(message)
    return case
