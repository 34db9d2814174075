"""The guard against kernels that are compiled while somebody waits."""

from __future__ import annotations

import logging
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from tandem_kernels.compile_guard import CompileGuard, described

knobs = pytest.importorskip("triton").knobs


def _post_compile(name: str) -> None:
    """Calls the hook as Triton does."""
    signature: dict[str, Any] = {"x": "*bf16", "rows": "i32", "BLOCK": "constexpr"}
    compiled = {
        "signature": signature,
        "constants": {(2,): 64},
        "configs": [{(0,): [["tt.divisibility", 16]], (1,): []}],
        "num_warps": 4,
    }
    information = SimpleNamespace(name=name)
    knobs.runtime.jit_post_compile_hook(repr=f"{name}(", fn=information, compile=compiled, key="")


@pytest.mark.parametrize(
    ("kernel", "count"),
    [
        ("attention.context_gather.gather_context_kernel", "num_keys"),
        ("collectives.peer_reduce.peer_reduce_kernel", "vectors"),
        ("collectives.peer_reduce_norm.peer_reduce_norm_kernel", "num_rows"),
        ("experts.fused_experts.expert_gemm_kernel", "num_row_tiles"),
        ("gemm.fused_qkv.fused_qkv_kernel", "num_rows"),
    ],
)
def test_kernels_are_the_same_for_any_number_of_tokens(kernel: str, count: str) -> None:
    """Triton compiles a kernel anew for a number that is 1, or a multiple of 16, where it may: a
    step would be the first with such a number, whatever has been warmed up."""
    module, _, name = kernel.rpartition(".")
    function = getattr(import_module(f"tandem_kernels.{module}"), name)
    (parameter,) = (one for one in function.params if one.name == count)
    assert parameter.do_not_specialize and not parameter.is_constexpr


def test_lists_and_logs_what_is_compiled_late(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heard = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **d: heard.append(d["repr"]))
    guard = CompileGuard()
    with caplog.at_level(logging.WARNING):
        _post_compile("early")
        guard.start()
        _post_compile("rms_norm_kernel")
        guard.stop()
        _post_compile("afterwards")
    assert guard.late == ["rms_norm_kernel(x: *bf16:16, rows: i32, BLOCK=64), 4 warps"]
    assert heard == ["early(", "rms_norm_kernel(", "afterwards("]
    assert "rms_norm_kernel" in caplog.text and "early" not in caplog.text


def test_what_triton_tells_of_a_compilation_is_understood() -> None:
    """The hook of the installed Triton, for a kernel of ours."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    from tandem_kernels.elementwise.rms_norm import rms_norm_kernel

    target = GPUTarget("cuda", 90, 32)
    options = make_backend(target).parse_options({"num_warps": 8})
    names = rms_norm_kernel.arg_names
    signature = dict.fromkeys(names, "i32") | {names[0]: "*bf16", names[-1]: "constexpr"}
    attributes = {(0,): [["tt.divisibility", 16]], (1,): []}
    told: list[str] = []
    rms_norm_kernel._call_hook(
        lambda **details: told.append(described(details)),
        "key",
        signature,
        target,
        0,
        {(len(names) - 1,): 4096},
        options,
        [attributes],
        False,
    )
    (text,) = told
    assert text.startswith(f"rms_norm_kernel({names[0]}: *bf16:16, {names[1]}: i32, ")
    assert text.endswith(f", {names[-1]}=4096), 8 warps")
