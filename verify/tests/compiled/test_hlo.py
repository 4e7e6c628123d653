"""Reading the HLO around a kernel."""

# ruff: noqa: E501  dumps have long lines

from __future__ import annotations

from verify.compiled.hlo import Array, Role, parse_array, parse_module

TEXT = """\
HloModule jit_f, is_scheduled=true

%fused_moves (p: f32[4,8,128]) -> bf16[8,4,128] {
  %p = f32[4,8,128]{2,1,0:T(8,128)} parameter(0)
  %transpose.1 = f32[8,4,128]{2,1,0:T(4,128)} transpose(%p), dimensions={1,0,2}
  ROOT %convert.1 = bf16[8,4,128]{2,1,0:T(4,128)(2,1)} convert(%transpose.1)
}

%fused_adds (p.1: bf16[4,8,128]) -> bf16[4,8,128] {
  %p.1 = bf16[4,8,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  ROOT %add.1 = bf16[4,8,128]{2,1,0:T(8,128)(2,1)} add(%p.1, %p.1)
}

ENTRY %main.1 (x.1: f32[4,8,128], t.1: s32[8,8]) -> bf16[4,8,128] {
  %t.1 = s32[8,8]{1,0:T(8,128)} parameter(1)
  %x.1 = f32[4,8,128]{2,1,0:T(8,128)} parameter(0)
  %copy.9 = s32[8,8]{0,1:T(8,128)} copy(%t.1)
  %moves = bf16[8,4,128]{2,1,0:T(4,128)(2,1)} fusion(%x.1), kind=kLoop, calls=%fused_moves, metadata={op_name="jit(f)/transpose"}
  %copy-start.1 = (bf16[8,4,128]{2,1,0:T(4,128)(2,1)S(1)}, bf16[8,4,128]{2,1,0:T(4,128)(2,1)}, u32[]{:S(2)}) copy-start(%moves)
  %copy-done.1 = bf16[8,4,128]{2,1,0:T(4,128)(2,1)S(1)} copy-done(%copy-start.1)
  %bitcast.1 = bf16[4,8,128]{2,0,1:T(8,128)(2,1)S(1)} bitcast(%copy-done.1)
  %mine.1 = bf16[4,8,128]{2,1,0:T(8,128)(2,1)} custom-call(%bitcast.1, /*index=1*/%copy.9), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"note": "{}"
}}, backend_config={"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"4096"},{"memory_space":"1","offset":"4096","size":"512"}]}
  ROOT %adds = bf16[4,8,128]{2,1,0:T(8,128)(2,1)} fusion(%mine.1), kind=kLoop, calls=%fused_adds
}
"""


def test_arrays() -> None:
    """Type, extent, order, tiling and memory space of an array."""
    array = parse_array("bf16[4,1024,128]{2,0,1:T(8,128)(2,1)S(1)}")
    assert array == Array("bf16", (4, 1024, 128), (2, 0, 1), ((8, 128), (2, 1)), 1)
    assert (str(array), array.bytes) == ("bf16[4,1024,128]", 2 * 4 * 1024 * 128)
    assert parse_array("u32[]{:S(2)}") == Array("u32", (), (), (), 2)
    assert parse_array("s4[3]").bytes == 2


def test_roles() -> None:
    """Moves, prefetches, work and views are told apart; a fusion is what its inside is."""
    module = parse_module(TEXT)
    assert {operation.name: module.role(operation) for operation in module.entry} == {
        "t.1": Role.FREE,
        "x.1": Role.FREE,
        "copy.9": Role.MOVE,
        "moves": Role.MOVE,
        "copy-start.1": Role.PREFETCH,
        "copy-done.1": Role.FREE,
        "bitcast.1": Role.FREE,
        "mine.1": Role.KERNEL,
        "adds": Role.COMPUTE,
    }


def test_moved_activations() -> None:
    """A transposed table of integers is no activation; a transposed array of floats is, unless it is tiny."""
    module = parse_module(TEXT)
    assert [operation.name for operation in module.moved_activations()] == ["moves"]
    assert module.moved_activations(smallest_bytes=8192) == ()


def test_kernels() -> None:
    """A kernel's operands and its scoped VMEM are found though its attributes run over several lines."""
    module = parse_module(TEXT)
    (kernel,) = module.kernels
    assert kernel.operands == ("bitcast.1", "copy.9")
    assert kernel.scoped_vmem_bytes == 4096 + 512
    operand = module.operand(kernel, 1)
    assert operand is not None
    assert operand.name == "copy.9"
    assert module.by_name["moves"].op_name == "jit(f)/transpose"
