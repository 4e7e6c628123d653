"""Compile one target ahead of time: the script that a fresh process runs, once.

libtpu reads its flags once in a process, and must never wake up in a process that does anything else.  This file is
run by path, in whichever environment holds the kernel: it imports JAX and the standard library alone.

It reads a JSON specification from standard input (see `verify.compiled.compile.Job.specification`) and leaves in its
output directory `compiled.hlo.txt` and `meta.json` beside the compiler's own dumps; or `error.json`.
"""

# ruff: noqa: PLC0415, ANN401  JAX is imported after the target, and its types with it

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import sysconfig
import time
import traceback
from pathlib import Path
from typing import Any

LARGEST_OPERAND = 1 << 16
"""Integer operands of a kernel with more elements than this are not recorded."""


def main() -> int:
    """Compile what standard input asks for."""
    spec = json.load(sys.stdin)
    out = Path(spec["out"])
    stage = ["start"]
    meta: dict[str, Any] = {"versions": versions()}
    try:
        compile_target(spec, out, stage, meta)
    except BaseException as error:  # noqa: BLE001  whatever the kernel under test raises is the result
        report = {
            "stage": stage[0],
            "kind": type(error).__name__,
            "message": str(error),
            "traceback": traceback.format_exc(),
            "frames": [
                [frame.filename, frame.lineno, frame.line] for frame in traceback.extract_tb(error.__traceback__)
            ],
            "sources": sources(),
        }
        (out / "error.json").write_text(json.dumps(report))
        return 1
    meta["sources"] = sources()
    (out / "meta.json").write_text(json.dumps(meta))
    return 0


def compile_target(spec: dict, out: Path, stage: list[str], meta: dict) -> None:
    """Import, trace, lower and compile; fill `meta`, keep `stage` up to date for error messages."""
    sys.path[:0] = spec["path"]
    stage[0] = "import"
    # A target may set flags for the CPU interpreter when it is imported (before JAX, as it must): they are not meant
    # for the TPU compiler.
    flags = os.environ.get("XLA_FLAGS")
    target = load(spec["reference"])
    restore("XLA_FLAGS", flags)
    import jax

    stage[0] = "topology"
    device = topology_device(spec)
    meta["device_kind"] = device.device_kind
    answer_device_questions(device)
    stage[0] = "arguments"
    function, args, kwargs, values = arguments(target, spec)
    sharding = jax.sharding.SingleDeviceSharding(device)
    args, kwargs = jax.tree.map(lambda leaf: row_major(leaf, sharding), (args, kwargs))
    stage[0] = "trace"
    start = time.perf_counter()
    results = jax.eval_shape(function, *args, **kwargs)
    formats = jax.tree.map(lambda leaf: row_major(leaf, sharding).format, results)
    traced = jax.jit(function, out_shardings=formats).trace(*args, **kwargs)
    meta["trace_seconds"] = time.perf_counter() - start
    meta["kernels"] = kernels(traced.jaxpr, jax.tree.leaves((values,), is_leaf=lambda leaf: leaf is None))
    stage[0] = "lower"
    start = time.perf_counter()
    lowered = traced.lower(lowering_platforms=("tpu",))
    meta["lower_seconds"] = time.perf_counter() - start
    stage[0] = "compile"
    start = time.perf_counter()
    compiled = lowered.compile()
    meta["compile_seconds"] = time.perf_counter() - start
    (out / "compiled.hlo.txt").write_text(compiled.as_text() or "")
    meta["memory"] = memory(compiled)
    meta["xla_flops"] = xla_flops(compiled)


def row_major(leaf: Any, sharding: Any) -> Any:
    """A shape in the layout that a Pallas kernel reads and writes.

    Left to itself XLA gives parameters and results of a program another one where it packs better (tokens on lanes for
    64 lanes of head_dim), and copies them: inside a model the neighbours of the kernel write and read its layout.
    """
    import jax
    from jax.experimental.layout import Format, Layout

    layout = Layout(major_to_minor=tuple(range(len(leaf.shape))))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=Format(layout, sharding))


def restore(name: str, value: str | None) -> None:
    """Set an environment variable, or remove it."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def versions() -> dict[str, str | None]:
    """What the result depends on besides the kernel."""
    found: dict[str, str | None] = {"python": sys.version.split()[0]}
    for package in ("jax", "jaxlib", "libtpu"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def load(reference: str) -> Any:
    """The object that `package.module:name` or `path/file.py:name` stands for."""
    place, _, name = reference.rpartition(":")
    if place.endswith(".py"):
        sys.path.insert(0, str(Path(place).resolve().parent))
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        if spec is None or spec.loader is None:
            message = f"cannot import {place}"
            raise ImportError(message)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return found


def topology_device(spec: dict) -> Any:
    """The device that is compiled for; it exists in the compiler's mind only."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        topology_name=spec["topology"], platform="tpu", chips_per_host_bounds=tuple(spec["chips"])
    )
    return topology.devices[0]


def answer_device_questions(device: Any) -> None:
    """Let kernels and lowering rules that ask for the local TPU hear about the one that is compiled for.

    JAX answers from the default device, here a CPU.  An abstract mesh would tell it, but it also changes how shardings
    are traced; so the two functions that look are replaced.
    """
    from jax._src import tpu_info

    kind = device.device_kind
    cores = 2 if kind in {"TPU v5", "TPU v5p", "TPU v4"} else 1
    version = tpu_info.chip_version_from_device_kind(kind)
    if version is None:
        message = f"JAX does not know the device kind {kind!r}"
        raise ValueError(message)
    info = tpu_info.get_tpu_info_for_chip(version, cores)
    replacements = {"get_tpu_info": lambda: info, "get_device_kind": lambda: kind, "is_tpu_device": lambda: True}
    originals = {id(getattr(tpu_info, name)) for name in replacements}
    importlib.import_module("jax.experimental.pallas.tpu")
    for module in [module for name, module in sys.modules.items() if name.startswith("jax")]:
        for name, replacement in replacements.items():
            if id(getattr(module, name, None)) in originals:
                setattr(module, name, replacement)


def arguments(target: Any, spec: dict) -> tuple[Any, tuple, dict, tuple]:
    """The function, its abstract arguments, and the known values of its array leaves (None where unknown)."""
    import functools

    import jax
    import numpy as np

    if spec["factory"]:
        made = target(**spec["options"])
        function, args = made[0], tuple(made[1])
        known = made[2] if len(made) > 2 else {}
        leaves = jax.tree.leaves(args)
        values = [np.asarray(known[index]) if index in known else None for index in range(len(leaves))]
        return function, args, {}, tuple(values)
    function = functools.partial(target, **spec["options"]) if spec["options"] else target
    args, kwargs, values = [], {}, []
    for entry in sorted(spec["arguments"], key=lambda entry: (entry["name"] is not None, entry["name"] or "")):
        abstract = jax.ShapeDtypeStruct(tuple(entry["shape"]), entry["dtype"])
        if entry["name"] is None:
            args.append(abstract)
        else:
            kwargs[entry["name"]] = abstract
        value = entry.get("value")
        values.append(None if value is None else np.asarray(value, entry["dtype"]).reshape(entry["shape"]))
    return function, tuple(args), kwargs, tuple(values)


def kernels(closed: Any, values: list) -> list[dict]:
    """What the trace says about each Pallas call: its name, its products, its integer operands where known."""
    walker = Walker()
    walker.walk(closed.jaxpr, [*closed.consts], values)
    return walker.found


class Walker:
    """Follows integer operands from the arguments to the Pallas calls, and lists the products inside them."""

    def __init__(self) -> None:
        self.found: list[dict] = []

    def walk(self, jaxpr: Any, consts: list, values: list) -> list:
        """Evaluate what is known; returns the known results (None where unknown)."""
        from jax.extend.core import Literal

        env: dict = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, values, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env.get(atom)

        for eqn in jaxpr.eqns:
            inputs = [read(atom) for atom in eqn.invars]
            if eqn.primitive.name == "pallas_call":
                self.found.append(describe(eqn, inputs))
                continue
            inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
            if inner is not None and eqn.primitive.name not in {"scan", "while", "cond"}:
                closed = inner if hasattr(inner, "consts") else None
                body, constants = (inner.jaxpr, list(inner.consts)) if closed is not None else (inner, [])
                if len(body.invars) == len(inputs):
                    env.update(zip(eqn.outvars, self.walk(body, constants, inputs), strict=True))
                    continue
            small = all(out.aval.size <= LARGEST_OPERAND for out in eqn.outvars if hasattr(out.aval, "size"))
            if inputs and small and all(known is not None for known in inputs):
                env.update(zip(eqn.outvars, evaluate(eqn, inputs), strict=True))
        return [read(atom) for atom in jaxpr.outvars]


def evaluate(eqn: Any, inputs: list) -> list:
    """The results of one equation on known values, or None for each where it cannot be had."""
    try:
        results = eqn.primitive.bind(*inputs, **eqn.params)
    except Exception:  # noqa: BLE001  an effect, a primitive that only a TPU has: unknown is a sound answer
        return [None] * len(eqn.outvars)
    return list(results) if eqn.primitive.multiple_results else [results]


def describe(eqn: Any, inputs: list) -> dict:
    """One Pallas call."""
    import numpy as np

    name = str(eqn.params.get("name") or getattr(eqn.params.get("name_and_src_info"), "name", "") or "")
    operands = {}
    for index, (atom, value) in enumerate(zip(eqn.invars, inputs, strict=True)):
        aval = atom.aval
        if np.issubdtype(aval.dtype, np.integer) or aval.dtype == np.bool_:
            known = value is not None and aval.size <= LARGEST_OPERAND
            operands[index] = {
                "shape": list(aval.shape),
                "dtype": str(aval.dtype),
                "value": np.asarray(value).reshape(-1).astype(int).tolist() if known else None,
            }
    return {"name": name, "source": source_of(eqn), "operands": operands, "products": products(eqn.params["jaxpr"])}


def products(jaxpr: Any) -> list[dict]:
    """Every `dot_general` inside a kernel, with its source line."""
    import jax

    found = []
    body = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in body.eqns:
        if eqn.primitive.name == "dot_general":
            lhs, rhs = (atom.aval for atom in eqn.invars)
            precision = eqn.params["precision"]
            names = [str(each) for each in precision] if isinstance(precision, tuple) else [str(precision)]
            found.append(
                {
                    "lhs": f"{lhs.dtype}[{','.join(map(str, lhs.shape))}]",
                    "rhs": f"{rhs.dtype}[{','.join(map(str, rhs.shape))}]",
                    "contracting": [list(map(int, axes)) for axes in eqn.params["dimension_numbers"][0]],
                    "result": str(eqn.outvars[0].aval.dtype),
                    "precision": names[0] if len(set(names)) == 1 else "/".join(names),
                    "source": source_of(eqn),
                }
            )
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            if hasattr(inner, "eqns") or hasattr(getattr(inner, "jaxpr", None), "eqns"):
                found += products(inner)
    return found


def source_of(eqn: Any) -> str:
    """File and line of the user's code that made an equation."""
    from jax._src import source_info_util

    return source_info_util.summarize(eqn.source_info)


def memory(compiled: Any) -> dict[str, int] | None:
    """XLA's own account of the program's memory, in bytes."""
    analysis = compiled.memory_analysis()
    names = ("generated_code_size", "argument_size", "output_size", "temp_size")
    return None if analysis is None else {name: getattr(analysis, f"{name}_in_bytes") for name in names}


def xla_flops(compiled: Any) -> float | None:
    """FLOP that XLA counts for the program (a kernel counts if it carries a cost estimate)."""
    try:
        flops = compiled.cost_analysis().get("flops")
    except Exception:  # noqa: BLE001  optional in the compiler, absent in some versions
        return None
    return None if flops is None or flops <= 0 else float(flops)


def sources() -> dict[str, str]:
    """Digest of every source file this process imported, the standard library, JAX and NumPy apart."""
    skip = tuple(
        str(Path(place).resolve())
        for place in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
        if place
    )
    site = tuple(str(Path(place).resolve()) for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    versioned = re.compile(r"/(?:jax|jaxlib|numpy|scipy|ml_dtypes|libtpu|opt_einsum)/")
    found = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not file or not file.endswith(".py") or not Path(file).is_file():
            continue
        path = str(Path(file).resolve())
        if (path.startswith(skip) and not path.startswith(site)) or versioned.search(path):
            continue
        found[path] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return found


if __name__ == "__main__":
    sys.exit(main())
