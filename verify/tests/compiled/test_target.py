"""What can be asked to be compiled."""

from __future__ import annotations

import pytest

from verify.compiled.generations import generation
from verify.compiled.target import Argument, Target
from verify.tests.compiled.conftest import KERNELS


def test_arguments() -> None:
    """Type, extent, keyword and values are read."""
    assert Argument.parse("bf16[1,8,1024,128]") == Argument((1, 8, 1024, 128), "bfloat16")
    assert Argument.parse("f32[]") == Argument((), "float32")
    assert Argument.parse("lengths=i32[3]=13,30,-7") == Argument((3,), "int32", "lengths", (13, 30, -7))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1024x128", r"an argument reads \[name=\]dtype\[shape\]\[=values\].*got '1024x128'"),
        ("bf17[4]", "dtype must be one of bf16, .* got 'bf17' in 'bf17"),
        ("i32[3]=1,2", "has 3 elements, got 2 values"),
    ],
)
def test_bad_arguments(text: str, message: str) -> None:
    """A wrong argument is refused with the rule and what was given."""
    with pytest.raises(ValueError, match=message):
        Argument.parse(text)


@pytest.mark.parametrize(
    ("reference", "options", "message"),
    [
        ("flywheel.attention", {}, "reads package.module:callable or path/file.py:callable"),
        ("nowhere/mine.py:kernel", {}, "there is no file nowhere/mine.py"),
        (f"{KERNELS}:plain", {}, "needs the shapes of its array arguments"),
        (f"{KERNELS}:product", {"factory": True, "arguments": (Argument((1,), "int32"),)}, "makes its own arguments"),
    ],
)
def test_bad_targets(reference: str, options: dict[str, object], message: str) -> None:
    """A target that cannot be meant is refused before anything is started."""
    with pytest.raises(ValueError, match=message):
        Target(reference, **options)  # type: ignore[arg-type]


def test_unknown_generation() -> None:
    """A generation that cannot be compiled for is refused with the list of those that can."""
    with pytest.raises(ValueError, match="generation must be one of v5e, v5p, v6e, v7x, got 'v4'"):
        generation("v4")
