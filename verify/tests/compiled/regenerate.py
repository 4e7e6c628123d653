"""Make the dumps that stand in `dumps/`: `python verify/tests/compiled/regenerate.py [INTERPRETER ...]`.

Each interpreter is one of an environment with another libtpu; without any, this one is used.  A dump is one gzipped
JSON file of what a compilation leaves, without the paths of the machine that made it.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from verify.compiled.compile import Artifact, Job, compile_job  # noqa: E402 - run by path, the package is in ROOT
from verify.compiled.dump import read_text  # noqa: E402
from verify.compiled.generations import GENERATIONS  # noqa: E402
from verify.compiled.target import Target  # noqa: E402

DUMPS = Path(__file__).with_name("dumps")
KERNELS = Path(__file__).with_name("kernels.py")
KEPT = ("lengths", "transposed")
_TABLES = re.compile(r"^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d.*\n)*\n?", re.MULTILINE)
_BODY = re.compile(r'"(body|debug_locations)":"[^"]*"')


def document(artifact: Artifact) -> dict[str, object]:
    """What is kept of a compilation."""
    meta = artifact.meta
    hlo = _BODY.sub(r'"\1":""', _TABLES.sub("", artifact.hlo()))
    kernels = [kernel | {"source": ""} for kernel in meta["kernels"]]
    for kernel in kernels:
        kernel["products"] = [product | {"source": ""} for product in kernel["products"]]
    kept = {name: meta[name] for name in ("versions", "memory", "compile_seconds")}
    return {
        "meta": kept | {"kernels": kernels, "sources": {}},
        "hlo": hlo,
        "same": artifact.same_schedule(),
        "operations": {
            name: [read_text(bundles), read_text(table) if table else None]
            for name, (bundles, table) in artifact.operations().items()
        },
    }


def main() -> None:
    """Compile every kept kernel for every generation with every given interpreter."""
    DUMPS.mkdir(exist_ok=True)
    for interpreter in sys.argv[1:] or [None]:
        for kernel in KEPT:
            for generation in GENERATIONS:
                artifact = compile_job(Job(Target(f"{KERNELS}:{kernel}", factory=True), generation, python=interpreter))
                path = DUMPS / f"{kernel}-{generation}-{artifact.versions['libtpu']}.json.gz"
                content = json.dumps(document(artifact), sort_keys=True).encode()
                path.write_bytes(gzip.compress(content, mtime=0))
                print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main()
