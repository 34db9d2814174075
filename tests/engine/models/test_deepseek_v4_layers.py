"""Layers of DeepSeek-V4 by themselves against transformers' modules, in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

from engine.layers.attention.rows.group_projection import GroupProjection
from engine.layers.feed_forward.router import Router, RouterOptions
from engine.layers.gemm_policy import GemmPolicy
from engine.layers.norm import RMSNorm
from engine.layers.rows import PairOutputs, QuantisedRows
from engine.layers.shard import CheckpointWeight, Shard
from engine.layers.streams.hyper_connection import HyperConnection, HyperHead, HyperStream
from engine.parallel.distributed import ParallelGroup
from engine.parallel.place import ParallelPlace
from engine.quantization import Fp8Scheme, Quantization, SchemeRule
from tandem_kernels import ops
from tandem_kernels.elementwise.gate_form import GateForm
from tandem_kernels.reference import experts, fp8
from tandem_kernels.stream_forms import StreamForm

CONFIG = DeepseekV4Config(
    vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
    qk_rope_head_dim=8, moe_intermediate_size=12, n_routed_experts=8, num_experts_per_tok=3,
    q_lora_rank=8, o_groups=2, o_lora_rank=4, hc_sinkhorn_iters=7, swiglu_limit=0.3,
    layer_types=["sliding_attention"] * 2,
)  # fmt: skip
FORM = StreamForm(CONFIG.hc_sinkhorn_iters, CONFIG.hc_eps, CONFIG.rms_norm_eps)
NUM_TOKENS, COUNT, SIZE = 9, CONFIG.hc_mult, CONFIG.hidden_size


@pytest.fixture
def shard() -> Shard:
    torch.manual_seed(3)
    place = ParallelPlace(range(1), ParallelGroup(0, 1))
    return Shard(place, torch.float32, torch.device("cpu"))


def drawn(module: torch.nn.Module) -> torch.nn.Module:
    """Returns the module with random numbers everywhere."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return module


def fill(weights: list[CheckpointWeight], sources: dict[str, Tensor]) -> None:
    assert {weight.name for weight in weights} == sources.keys()
    for weight in weights:
        assert weight.shape == tuple(sources[weight.name].shape)
        weight.target.copy_(sources[weight.name])


def of_module(module: torch.nn.Module, prefix: str, cut: str = "") -> dict[str, Tensor]:
    own = module.state_dict()
    return {f"{prefix}_{name.removeprefix(cut)}": tensor for name, tensor in own.items()}


@pytest.mark.parametrize("norms", [False, True])
def test_a_block_reads_and_writes_streams_as_theirs(norms: bool, shard: Shard) -> None:
    """Two blocks behind each other, and the head: streams differ by then. Each reads plain rows, or
    a norm of them; part of what the second adds is given beside the rest."""
    modules = [drawn(theirs.DeepseekV4HyperConnection(CONFIG)) for _ in range(2)]
    head = drawn(theirs.DeepseekV4HyperHead(CONFIG))
    x, added = torch.randn(NUM_TOKENS, SIZE), torch.randn(2, NUM_TOKENS, SIZE)
    stream = HyperStream.begun(x, COUNT)
    expected = x[None, :, None].repeat(1, 1, COUNT, 1)
    norm = RMSNorm(SIZE, CONFIG.rms_norm_eps, shard)
    norm.weight.copy_(torch.randn(SIZE))
    for module, own in zip(modules, added, strict=True):
        ours = HyperConnection(SIZE, COUNT, FORM, shard)
        fill(list(ours.checkpoint_weights("hc")), of_module(module, "hc"))
        post, comb, read = module(expected)
        stream.enter(ours)
        if not norms:
            torch.testing.assert_close(stream.read(None), read[0])
        normed = ops.rms_norm(read[0], norm.weight, norm.eps)
        torch.testing.assert_close(stream.read(norm), normed)
        # What `DeepseekV4DecoderLayer` does.
        expected = post[..., None] * own[None, :, None] + comb.transpose(-1, -2) @ expected
        stream.add(own if module is modules[0] else PairOutputs(own / 4, None, own - own / 4))
        if not norms:
            torch.testing.assert_close(stream.value(), expected[0].flatten(1))
    ours = HyperHead(SIZE, COUNT, FORM, shard)
    fill(list(ours.checkpoint_weights("hc")), of_module(head, "hc", "hc_"))
    stream.enter(ours)
    if norms:
        last = ops.rms_norm(head(expected)[0], norm.weight, norm.eps)
        torch.testing.assert_close(stream.normed(norm), last)
        torch.testing.assert_close(stream.value(), expected[0].flatten(1))
    else:
        torch.testing.assert_close(stream.read(None), head(expected)[0])


def test_streams_are_mixed_by_sums_of_one(shard: Shard) -> None:
    """Rows and columns of the mix have sums of one, so that no stream grows by mixing."""
    ours = drawn(HyperConnection(SIZE, COUNT, StreamForm(40, 1e-6, 1e-6), shard))
    ours.fn.mul_(0.1)
    stream = HyperStream.begun(torch.randn(NUM_TOKENS, SIZE), COUNT)
    stream.enter(ours)
    stream.read(None)
    for dim in (-1, -2):
        sums = stream.comb.sum(dim)
        torch.testing.assert_close(sums, torch.ones_like(sums), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("hashed", [False, True])
def test_a_router_chooses_as_theirs(hashed: bool, shard: Shard) -> None:
    kind = theirs.DeepseekV4HashRouter if hashed else theirs.DeepseekV4TopKRouter
    router = drawn(kind(CONFIG))
    options = RouterOptions(
        top_k=3, root_softplus=True, has_bias=not hashed, scaling=CONFIG.routed_scaling_factor,
        table_size=CONFIG.vocab_size if hashed else 0,
    )  # fmt: skip
    ours = Router(SIZE, 8, options, shard)
    x, ids = torch.randn(NUM_TOKENS, SIZE), torch.randint(50, (NUM_TOKENS,))
    sources = {"w": router.weight.data}
    if hashed:
        router.tid2eid.copy_(torch.rand(50, 8).argsort(1)[:, :3])
        sources["t"] = router.tid2eid
        _, weights, chosen = router(x, ids)
    else:
        router.e_score_correction_bias.copy_(torch.randn(8))
        sources["b"] = router.e_score_correction_bias
        _, weights, chosen = router(x)
    fill(list(ours.checkpoint_weights("w", "b", "l", "s", "n", "t")), sources)
    found_weights, found = ours(x, ids)
    for own_ids, own, their_ids, their in zip(found, found_weights, chosen, weights, strict=True):
        assert own_ids.sort().values.tolist() == their_ids.sort().values.tolist()
        torch.testing.assert_close(own[own_ids.sort().indices], their[their_ids.sort().indices])
    ids[4] = -1
    assert ours(x, ids)[1][4].tolist() == [-1] * 3


def test_gates_are_capped_as_theirs() -> None:
    gates, ups = torch.randn(2, NUM_TOKENS, 12)
    module = theirs.DeepseekV4Experts(CONFIG)
    expected = module._apply_gate(torch.cat((gates, ups), dim=1))
    form = GateForm("capped", CONFIG.swiglu_limit)
    torch.testing.assert_close(experts.activated(gates, ups, form), expected)
    torch.testing.assert_close(ops.bounded_gate_and_mul(torch.cat((gates, ups), 1), form), expected)


def test_groups_of_the_output_in_fp8(shard: Shard) -> None:
    """Weights that stay FP8 give what the same numbers written out do; rows that are quantised for
    them differ by their rounding alone."""
    scheme = Fp8Scheme(scales="block", block=(128, 128), scale_name="weight_scale_inv")
    numbers, scales = fp8.to_e4m3(torch.randn(512, 256) * 50), torch.rand(4, 2) / 500
    stored = {"o.weight": numbers, "o.weight_scale_inv": scales}
    x, plain = torch.randn(5, 4, 256), fp8.dequantise_weight(numbers, scales)
    exact = torch.einsum("tgk,gnk->tgn", x, plain.view(4, 128, 256)).flatten(1)
    quantization = Quantization(method="fp8", rules=(SchemeRule(("o",), scheme),))
    for kept in (True, False):
        own = replace(shard, gemms=GemmPolicy(fp8=kept), quantization=quantization, prefix="o")
        layer = GroupProjection(256, 128, 4, 128, own)
        for weight in layer.checkpoint_weights("o"):
            assert weight.fill is not None
            weight.fill(stored[weight.name], *(stored[one.name] for one in weight.companions))
        torch.testing.assert_close(layer(x), exact)
        assert layer.takes_fp8(64) == kept and not layer.takes_fp8(65)
        if kept:
            rows = QuantisedRows(*fp8.quantise_fp8(x.flatten(1), 128))
            found = layer.quantised(rows, torch.float32)
            assert 0.005 < float((found - exact).norm() / exact.norm()) < 0.05
