"""Where Hypothesis keeps its examples: a folder, shared or not, or a Redis server (Hypothesis' own Redis database)."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis.database import DirectoryBasedExampleDatabase

if TYPE_CHECKING:
    from hypothesis.database import ExampleDatabase

REDIS = "redis://"


class DatabaseError(ValueError):
    """A database that cannot be opened."""


def opened(where: str, default: Path) -> ExampleDatabase:
    """The database of one hunt.

    Args:
        where: a folder, `redis://host:port/number`, or empty for the default.
        default: the folder in the campaign's directory; its name is the hunt's.

    Raises:
        DatabaseError: Redis is asked for and its client is not installed.
    """
    if not where.startswith(REDIS):
        return DirectoryBasedExampleDatabase(Path(where) / default.name if where else default)
    try:
        client: Any = importlib.import_module("redis").Redis
        from hypothesis.extra.redis import RedisExampleDatabase  # noqa: PLC0415  needs the client
    except ImportError as error:
        message = f"database {where} needs the Redis client (uv sync --group cluster): {error}"
        raise DatabaseError(message) from error
    return RedisExampleDatabase(client.from_url(where), key_prefix=f"flywheel:{default.name}:".encode())
