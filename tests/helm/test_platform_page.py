"""The page docs/platform.md says what is true: sizes, by our own code, versions, values."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.engine.models.shapes import SHAPES, config_json
from engine.config import CacheConfig, kv_groups
from engine.models.checkpoint import load_model_config
from kv_transfer.layout import KVGroup, KVLayout
from tests.helm.helm_engine import CHART, ROOT, HelmSdk, load_values
from tests.helm.scenarios import overlay, reproducible, serving_pod, values_of

PAGE = (ROOT / "docs" / "platform.md").read_text(encoding="utf-8")
SHAPES_OF = {
    "Llama-3.1-8B": SHAPES["llama-3.1-8b"],
    "Llama-3.1-70B": SHAPES["llama-3.1-8b"]
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "Qwen3-30B-A3B": SHAPES["qwen3-30b-a3b"],
    "gpt-oss-20b": SHAPES["gpt-oss-20b"],
    "gpt-oss-120b": SHAPES["gpt-oss-120b"],
    "DeepSeek-V2-Lite": SHAPES["deepseek-v2-lite"],
    "DeepSeek-V3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}


def table(head: str) -> list[list[str]]:
    """Returns the rows of the table whose first cell is `head`, without that line."""
    rows = re.search(rf"^\| ?{re.escape(head)}.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert rows
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1].splitlines()]


def blocks() -> list[Any]:
    found = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return [yaml.safe_load(text) for text in found]


@pytest.fixture(scope="module")
def groups_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def found(model: str) -> list[KVGroup]:
        folder = tmp_path_factory.mktemp("model")
        with pytest.MonkeyPatch.context() as patched:
            patched.setitem(SHAPES, model, SHAPES_OF[model])
            text = json.dumps(config_json(model))
        (Path(folder) / "config.json").write_text(text, encoding="utf-8")
        return kv_groups(load_model_config(folder, load_format="dummy"), CacheConfig(block_size=32))

    return found


def bytes_pulled(groups: list[KVGroup], ranks: int) -> int:
    """Returns what a decode node of so many ranks pulls of one token: each rank's share of a block
    of one prefill rank, over the tokens of a block."""
    layout = KVLayout(groups=tuple(groups), tp_size=1, model_hash="")
    return sum(
        page.num_bytes * len(group.layers) // group.block_size
        for rank in range(ranks)
        for page, group in zip(layout.share(0, rank, ranks), groups, strict=True)
    )


@pytest.mark.parametrize("row", table("model, bf16 cache"), ids=lambda row: row[0])
def test_kv_sizes_are_those_of_the_layout(row: list[str], groups_of: Any) -> None:
    name, each, besides, rate = row
    model, _, ranks = name.partition(", ")
    groups = groups_of(model)
    endless = [group for group in groups if group.window is None]
    count = int(ranks.split()[0]) if ranks else 1
    assert int(each) == bytes_pulled(endless, count)
    windows = [group for group in groups if group.window is not None]
    extra = sum(group.window or 0 for group in windows[:1]) * bytes_pulled(windows, count)
    assert besides == (f"{extra / 1e6:.1f} MB" if extra else "")
    assert float(rate) == round(int(each) * 10_000 * 8 / 1e9, 1)


def test_both_tables_have_the_same_models() -> None:
    network = {row[0].partition(",")[0] for row in table("model, bf16 cache")}
    assert network == {row[0] for row in table("model | parameters")} == set(SHAPES_OF)


def num_parameters(shape: dict[str, Any]) -> float:
    """Returns the weights of a model, counted from its config; norms and biases are too few to
    matter."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    if "kv_lora_rank" in shape:
        latent, rotary = shape["kv_lora_rank"], shape["qk_rope_head_dim"]
        query = heads * (shape["qk_nope_head_dim"] + rotary)
        low = shape.get("q_lora_rank")
        attention = (hidden + query) * low if low else hidden * query
        attention += hidden * (latent + rotary) + heads * shape["v_head_dim"] * hidden
        attention += latent * heads * (shape["qk_nope_head_dim"] + shape["v_head_dim"])
    else:
        attention = 2 * hidden * shape["head_dim"] * (heads + shape["num_key_value_heads"])
    experts = next((shape[key] for key in _NUM_EXPERTS if key in shape), 0)
    width = shape.get("moe_intermediate_size", shape["intermediate_size"])
    dense = shape.get("first_k_dense_replace", 0) if experts else shape["num_hidden_layers"]
    sparse = 3 * hidden * width * (experts + (shape.get("n_shared_experts") or 0))
    layers = shape["num_hidden_layers"]
    total = layers * attention + (layers - dense) * sparse
    total += dense * 3 * hidden * shape["intermediate_size"]
    return total + 2 * shape["vocab_size"] * hidden


_NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


@pytest.mark.parametrize("row", table("model | parameters"), ids=lambda row: row[0])
def test_checkpoint_sizes_follow_from_parameters(row: list[str]) -> None:
    model, parameters, *sizes = row
    count = num_parameters(SHAPES_OF[model])
    assert float(parameters.split()[0]) * 1e9 == pytest.approx(count, rel=0.01)
    bf16, fp8, four, mxfp4 = (float(size.strip("*") or 0) for size in sizes)
    assert bf16 == pytest.approx(2 * count / 1e9, rel=0.01)
    # Embeddings stay in bf16 everywhere, and are less than a tenth of the weights.
    assert not fp8 or count <= fp8 * 1e9 < 1.15 * count
    assert not four or 0.5 * count <= four * 1e9 < 0.75 * count
    assert not mxfp4 or 0.53 * count <= mxfp4 * 1e9 < 0.7 * count


def test_versions_are_those_of_chart_and_images() -> None:
    rows = {row[0]: row[1:] for row in table("| version")}
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["kubeVersion"].startswith(f">={rows['Kubernetes'][0]}.")
    lock = (ROOT / "requirements" / "image-engine.lock").read_text(encoding="utf-8")
    runtime = re.search(r"^nvidia-cuda-runtime==(\d+\.\d+)\.", lock, re.MULTILINE)
    assert runtime and f"CUDA {runtime[1]}" in rows["NVIDIA driver"][1]
    for page in ("operations.md", "kubernetes.md"):
        for version in re.findall(
            r"(KEDA|LeaderWorkerSet)\W+(\d[\d.]+\d)", (ROOT / "docs" / page).read_text("utf-8")
        ):
            assert version[1] in " ".join(rows[version[0]]), f"{page}: {version}"


def test_drains_for_spot_hosts_fit_the_shortest_notice() -> None:
    (block,) = (block for block in blocks() if "drain" in (block.get("decode") or {}))
    found = HelmSdk.shared().render(overlay(values_of("default"), block))
    assert serving_pod(found, "decode")["spec"]["terminationGracePeriodSeconds"] <= 30


def test_the_route_leads_to_the_routers_port_and_pods_name_no_user() -> None:
    (block,) = (block for block in blocks() if "extraObjects" in block)
    found = HelmSdk.shared().render(overlay(values_of("default"), block), release="tandem")
    route, service = found.one("Route")["spec"], found.one("Service", "router")
    assert route["to"]["name"] == service["metadata"]["name"]
    assert route["port"]["targetPort"] in {port["name"] for port in service["spec"]["ports"]}
    for component in ("router", "prefill", "decode"):
        context = serving_pod(found, component)["spec"]["securityContext"]
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & context.keys()
        assert context["runAsNonRoot"] is True


def test_argo_cd_renders_the_same_each_time_and_ignores_what_autoscalers_set() -> None:
    """A token or certificate that the chart draws would differ."""
    (spec,) = (block["spec"] for block in blocks() if block.get("kind") == "Application")
    values = spec["source"]["helm"]["valuesObject"]
    once, again = (HelmSdk.shared().render(values, release="tandem") for _ in range(2))
    assert once.objects == again.objects and not once.all("Secret")
    drawn = HelmSdk.shared().render(values_of("default"))
    assert drawn.all("Secret") and reproducible(drawn) != drawn.objects
    chart = load_values(CHART / "Chart.yaml")
    assert (spec["source"]["chart"], spec["source"]["targetRevision"]) == (
        chart["name"],
        chart["version"],
    )
    scaled = {
        target["spec"]["scaleTargetRef"]["name"] for target in once.all("HorizontalPodAutoscaler")
    }
    assert {one["name"] for one in spec["ignoreDifferences"]} == scaled
    assert "RespectIgnoreDifferences=true" in spec["syncPolicy"]["syncOptions"]


def test_fluxs_values_render() -> None:
    (spec,) = (block["spec"] for block in blocks() if block.get("kind") == "HelmRelease")
    assert HelmSdk.shared().render(spec["values"]).all("HorizontalPodAutoscaler")
