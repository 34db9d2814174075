"""FlashAttention 3 behind the attention interface, with a stand-in that computes by the meaning of
its arguments, and the choice of kernels at start-up."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from engine.config import DeviceConfig, EngineConfig, KVLayers
from engine.layers.attention.paged import PagedBackend
from engine.layers.attention.selection import choose_attention
from engine.layers.attention.whole_prompts import flash_attention
from engine.layers.attention.whole_prompts.cudnn_prefill import CudnnPrefill
from engine.layers.attention.whole_prompts.flash_attention import PREFILL_PACKAGE, FlashPrefill
from engine.layers.attention.whole_prompts.flash_limits import AttentionBackendError
from engine.layers.attention.whole_prompts.uncached_prefill import UncachedPrefillBackend
from kv_transfer.planes import Plane
from tandem_kernels import ops
from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tests.engine.worker.conftest import tiny_config

CPU = torch.device("cpu")


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attends: [T, Hq, D] over pages [N, B, Hkv, D]; a request's queries are the last of its
    context. Also returns the log of the softmax's sums, [Hq, T], if asked.
    """
    assert causal and k_cache.stride(-1) == v_cache.stride(-1) == 1
    assert {cache_seqlens.dtype, page_table.dtype, cu_seqlens_q.dtype} == {torch.int32}
    out = torch.full_like(q, torch.nan)
    log_sums = torch.full((q.shape[1], len(q)), torch.nan)
    for r, length in enumerate(cache_seqlens.tolist()):
        start, end = cu_seqlens_q[r : r + 2].tolist()
        assert end - start <= max_seqlen_q
        pages = page_table[r, : -(-length // k_cache.shape[1])].long()
        k, v = (cache[pages].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        group = q.shape[1] // k.shape[1]
        k, v = (part.repeat_interleave(group, dim=1).transpose(0, 1) for part in (k, v))
        scores = q[start:end].transpose(0, 1) @ k.mT * softmax_scale
        hidden = torch.ones(scores.shape[1:]).triu(length - (end - start) + 1).bool()
        scores = scores.masked_fill(hidden, -torch.inf)
        out[start:end] = (scores.softmax(-1) @ v).transpose(0, 1)
        log_sums[:, start:end] = scores.logsumexp(-1)
    return (out, log_sums) if return_softmax_lse else out


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(flash_attention.PACKAGE)
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    module.__spec__ = sys.__spec__
    monkeypatch.setitem(sys.modules, flash_attention.PACKAGE, module)


def config(tmp_path, **device: object) -> EngineConfig:
    base = tiny_config(tmp_path)
    return replace(base, device=DeviceConfig(**device))


def test_gets_our_cache_and_metadata_as_it_wants_them(installed) -> None:
    query_lens, seq_lens, block_size = [1, 1, 5, 20], [7, 33, 12, 20], 8
    kv_cache = torch.randn(24, 2, 2, block_size, 16)
    metadata = AttentionMetadata(
        block_tables=torch.randperm(24).int().view(4, 6),
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seq_lens=torch.tensor(seq_lens).int(),
        num_decodes=2,
        max_query_len=20,
        max_seq_len=33,
    )
    q = torch.randn(sum(query_lens), 6, 16)
    for sinks in (None, torch.linspace(-2, 5, 6)):
        expected = ops.paged_attention(q, kv_cache, metadata, 0.25, sinks=sinks)
        found = flash_attention.flash_attention(q, kv_cache, metadata, 0.25, sinks)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_choice_is_logged_and_says_what_is_missing(tmp_path, caplog) -> None:
    with caplog.at_level(logging.INFO):
        assert choose_attention(config(tmp_path), CPU) == PagedBackend()
    assert "attention: torch" in caplog.text
    wanted = config(tmp_path, attention_backend="flash-attn")
    with pytest.raises(AttentionBackendError, match="needs the package flash_attn_interface"):
        choose_attention(wanted, CPU)
    ordered = config(tmp_path, attention_backend="flash-attn", deterministic=True)
    with pytest.raises(AttentionBackendError, match="flash-attn has no deterministic mode"):
        choose_attention(ordered, CPU)
    ordered = config(tmp_path, deterministic=True)
    assert choose_attention(ordered, CPU) == PagedBackend(fixed_order=True)


def test_what_it_cannot_compute_is_refused(installed, tmp_path) -> None:
    wanted = config(tmp_path, attention_backend="flash-attn")
    with pytest.raises(AttentionBackendError, match="does not compute torch.float32"):
        choose_attention(wanted, CPU)


def test_one_that_does_not_load_is_named(tmp_path, monkeypatch) -> None:
    (tmp_path / f"{flash_attention.PACKAGE}.py").write_text("raise ImportError('no symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(flash_attention, "is_available", lambda *shape: True)
    wanted = config(tmp_path, attention_backend="flash-attn")
    with pytest.raises(AttentionBackendError, match=r"does not load: no symbol; install it for"):
        choose_attention(wanted, CPU)


def test_is_taken_where_it_can_be_had(installed, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(flash_attention, "is_available", lambda *shape: True)
    wanted = config(tmp_path, attention_backend="flash-attn")
    assert choose_attention(wanted, CPU) == PagedBackend(flash_attention.flash_attention)


def test_sinks_and_windows_of_some_layers_leave_it_the_others(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN's interface does not tell the sums that sinks need."""
    package = ModuleType(PREFILL_PACKAGE)
    package.__spec__ = sys.__spec__
    monkeypatch.setattr(flash_attention, "forward_kernel", lambda package: print)
    wanted = config(tmp_path)
    planes = Plane("k", 2, 32), Plane("v", 2, 32)
    full = KVLayers(layers=(0,), planes=planes)
    layers = full, KVLayers(layers=(1,), planes=planes, window=8)
    bf16 = replace(wanted, model=replace(wanted.model, dtype="bfloat16", kv_layers=layers))
    monkeypatch.setattr(CudnnPrefill, "is_available", staticmethod(lambda *shape: True))
    cudnn = choose_attention(bf16, CPU)
    assert isinstance(cudnn, UncachedPrefillBackend) and isinstance(cudnn.dense, CudnnPrefill)
    assert choose_attention(bf16, CPU, has_sinks=True) == PagedBackend()
    assert choose_attention(bf16, CPU, rare_attention="what is rare") == PagedBackend()
    monkeypatch.setitem(sys.modules, PREFILL_PACKAGE, package)
    monkeypatch.setattr(flash_attention, "is_available", lambda *shape: True)
    flash = choose_attention(bf16, CPU, has_sinks=True)
    assert isinstance(flash, UncachedPrefillBackend) and isinstance(flash.dense, FlashPrefill)
    all_windows = replace(bf16, model=replace(bf16.model, kv_layers=(replace(full, window=8),)))
    assert choose_attention(all_windows, CPU) == PagedBackend()
    everything = replace(bf16, device=DeviceConfig(attention_backend="flash-attn"))
    with pytest.raises(AttentionBackendError, match="does not have a sliding window"):
        choose_attention(everything, CPU)


def test_long_prompts_are_its_where_its_forward_kernels_are_installed(
    tmp_path, monkeypatch, caplog
) -> None:
    package = ModuleType(PREFILL_PACKAGE)
    package.__spec__ = sys.__spec__
    monkeypatch.setattr(flash_attention, "forward_kernel", lambda package: print)
    monkeypatch.setitem(sys.modules, PREFILL_PACKAGE, package)
    monkeypatch.setattr(flash_attention, "is_available", lambda *shape: True)
    wanted = config(tmp_path)
    bf16 = replace(wanted, model=replace(wanted.model, dtype="bfloat16"))
    with caplog.at_level(logging.INFO):
        chosen = choose_attention(bf16, CPU)
    assert isinstance(chosen, UncachedPrefillBackend) and chosen.paged == PagedBackend()
    assert isinstance(chosen.dense, FlashPrefill)
    assert chosen.expands_contexts and "long prompts: FlashAttention 3" in caplog.text
    fp16 = replace(wanted, model=replace(wanted.model, dtype="float16"))
    assert choose_attention(fp16, CPU) == PagedBackend()
    ours = replace(bf16, device=DeviceConfig(attention_backend="triton"))
    assert choose_attention(ours, CPU) == PagedBackend()


def test_a_package_that_does_not_load_is_said_and_left_out(tmp_path, monkeypatch, caplog) -> None:
    (tmp_path / f"{PREFILL_PACKAGE}.py").write_text("raise ImportError('another torch')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(flash_attention, "is_available", lambda *shape: True)
    wanted = config(tmp_path)
    bf16 = replace(wanted, model=replace(wanted.model, dtype="bfloat16"))
    assert choose_attention(bf16, CPU) == PagedBackend()
    assert f"{PREFILL_PACKAGE} is installed but does not load: another torch" in caplog.text
