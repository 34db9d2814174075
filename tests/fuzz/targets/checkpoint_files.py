"""Files of checkpoints and adapters: refused in a sentence, or read as the reference reads them."""

from __future__ import annotations

import base64
import json
import math
import struct
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import safetensors
from hypothesis import strategies as st
from safetensors.numpy import load

from engine.frontend.tokenizer import Tokenizer, TokenizerError
from engine.models.adapters.adapter_files import read_adapter
from engine.models.checkpoint import check_architecture, load_model_config
from engine.models.errors import CheckpointError
from engine.models.files.stored_tensors import read_header
from engine.models.gguf.gguf_header import GgufHeader
from engine.models.vocabularies.kimi import read_kimi
from engine.models.vocabularies.tekken import read_tekken
from tests.fuzz.damage import HUGE, JSON, altered, damaged, documents, files, json_bytes, unpacked
from tests.fuzz.target import Fault, Target, judged, same

_DEMO = Path(__file__).resolve().parents[3] / "cli" / "demo_checkpoint"
_DTYPES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1, "F8_E4M3": 1, "I64": 8, "BOOL": 1, "F4": 0.5}


@cache
def _folder() -> Path:
    """Returns a folder in memory, if there is any, that goes with the process."""
    shared = Path("/dev/shm")
    place = str(shared) if shared.is_dir() else None
    made = tempfile.TemporaryDirectory(prefix="tandem-fuzz-", dir=place)
    _folder.kept = made  # type: ignore[attr-defined]
    return Path(made.name)


def _written(data: bytes, *names: str) -> Path:
    """Returns the folder with the files of an input, and no others."""
    for path in _folder().iterdir():
        path.unlink()
    for name, content in unpacked(data):
        if name in names:
            (_folder() / name).write_bytes(content)
    return _folder()


# safetensors --------------------------------------------------------------------------------------


def _stored(header: Any, body: bytes) -> bytes:
    text = json_bytes(header) if not isinstance(header, bytes) else header
    return struct.pack("<Q", len(text)) + text + body


@st.composite
def _tensors(draw: st.DrawFn, name: st.SearchStrategy[str] | None = None) -> bytes:
    """Draws a file of some tensors, whose header is altered."""
    header: dict[str, Any] = {}
    end = 0
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(sorted(_DTYPES)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        size = math.ceil(math.prod(shape) * _DTYPES[kind])
        key = draw(name if name is not None else st.sampled_from(["a", "b", "é", "x.weight", ""]))
        header[key] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    if draw(st.booleans()):
        header["__metadata__"] = {"format": "pt"}
    if draw(st.booleans()):
        header = draw(altered(header))
    body = bytes(end + draw(st.sampled_from([0, 0, 0, 1, -1])) if end else 0)
    return draw(damaged(st.just(_stored(header, body)), 2))


def _check_safetensors(data: bytes) -> None:
    path = _folder() / "one.safetensors"
    path.write_bytes(data)
    ours = judged(lambda: read_header(path), CheckpointError)
    try:
        with safetensors.safe_open(path, "numpy") as file:
            theirs = {
                name: (file.get_slice(name).get_dtype(), tuple(file.get_slice(name).get_shape()))
                for name in file.keys()  # noqa: SIM118 (no mapping)
            }
    except Exception as error:  # the library raises a class of its own
        if ours is not None:
            raise Fault(f"safetensors refuses it: {error}") from error
        return
    if ours is None:
        return  # We may be stricter.
    same({n: (t.dtype, t.shape) for n, t in ours.items()}, theirs, "tensors")
    plain = {n: t for n, t in ours.items() if t.dtype in ("F32", "F16", "U8", "I64")}
    if len(plain) == len(ours):
        for name, array in load(data).items():
            same(data[plain[name].start : plain[name].stop], array.tobytes(), f"bytes of {name}")


# GGUF ---------------------------------------------------------------------------------------------


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


@st.composite
def _gguf_value(draw: st.DrawFn, depth: int = 0) -> bytes:
    kind = draw(st.sampled_from([0, 1, 4, 5, 6, 7, 8, 9, 10, 12, 13, 255]))
    head = struct.pack("<I", kind)
    if kind == 8:
        return head + _text(draw(st.text(max_size=5)))
    if kind == 9 and depth < 40:
        inner = draw(_gguf_value(depth + draw(st.sampled_from([1, 30]))))
        count = draw(st.sampled_from([0, 1, 1, 2, 1 << 20, *HUGE]))
        return head + inner[:4] + struct.pack("<Q", count % (1 << 64)) + inner[4:]
    return head + draw(st.binary(min_size=1, max_size=8))


@st.composite
def _gguf(draw: st.DrawFn) -> bytes:
    keys = st.sampled_from(["general.architecture", "general.alignment", "llama.block_count", "x"])
    values = [_text(draw(keys)) + draw(_gguf_value()) for _ in range(draw(st.integers(0, 3)))]
    tensors = []
    for _ in range(draw(st.integers(0, 2))):
        shape = draw(st.lists(st.sampled_from([0, 1, 32, 256, *HUGE]), max_size=5))
        dims = b"".join(struct.pack("<Q", size % (1 << 64)) for size in shape)
        end = struct.pack("<IQ", draw(st.integers(0, 40)), draw(st.sampled_from([0, 32, 1 << 63])))
        tensors.append(_text("t") + struct.pack("<I", len(shape)) + dims + end)
    count = struct.pack("<QQ", len(tensors), len(values))
    head = b"GGUF" + struct.pack("<I", draw(st.sampled_from([1, 2, 3, 3, 4]))) + count
    return draw(damaged(st.just(b"".join([head, *values, *tensors])), 2))


def _check_gguf(data: bytes) -> None:
    header = judged(lambda: GgufHeader(memoryview(data)), ValueError, struct.error)
    if header is not None and any(
        tensor.start > len(data) + (1 << 64) or tensor.start < 0 for tensor in header.tensors
    ):
        raise Fault("a tensor lies nowhere")


# Tokenizers ---------------------------------------------------------------------------------------


@cache
def _demo_json(name: str) -> Any:
    found = json.loads((_DEMO / name).read_text(encoding="utf-8"))
    if name == "tokenizer.json":
        vocab = found["model"]["vocab"]
        kept = {token: id_ for token, id_ in vocab.items() if id_ < 270}
        merges = [
            m
            for m in found["model"]["merges"]
            if "".join(m if isinstance(m, list) else m.split(" ", 1)) in kept
        ]
        found["model"] = {**found["model"], "vocab": kept, "merges": merges[:20]}
    return found


_TOKENIZER_NAMES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def _check_tokenizer(data: bytes) -> None:
    folder = _written(data, *_TOKENIZER_NAMES)
    found = judged(lambda: Tokenizer.from_folder(folder), TokenizerError)
    if found is None:
        return
    for text in ("Ada the clockmaker", "", "日本 \x00é"):
        ids = found.encode(text)
        found.decode(ids)


@st.composite
def _tiktoken(draw: st.DrawFn) -> bytes:
    tokens = [bytes([i]) for i in range(256)] + [b"ab", b"abc", b"bc"]
    lines = [base64.b64encode(token) + b" %d" % i for i, token in enumerate(tokens)]
    return draw(damaged(st.just(b"\n".join(lines[: draw(st.sampled_from([1, 3, 259]))])), 2))


@st.composite
def _tekken(draw: st.DrawFn) -> bytes:
    vocab = [
        {"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": None}
        for i in range(draw(st.sampled_from([0, 2, 8])))
    ]
    config = {
        "pattern": draw(st.sampled_from([r"\w+", "(", "", r"(a+)+b", r"[^\r\n\p{L}]"])),
        "default_vocab_size": len(vocab) + 3,
        "default_num_special_tokens": 3,
        "num_vocab_tokens": len(vocab),
    }
    special = [{"rank": i, "token_str": f"<{i}>", "is_control": True} for i in range(3)]
    return draw(documents({"config": config, "vocab": vocab, "special_tokens": special}, most=2))


def _check_vocabulary(read: Callable[[Path], Any], name: str, data: bytes) -> None:
    folder = _written(data, name, "tokenizer_config.json")
    if (folder / name).is_file():
        found = judged(lambda: read(folder / name), CheckpointError)
        if found is not None:
            found.encode("Ada the clockmaker")


# Configurations and adapters ----------------------------------------------------------------------


def _check_config(data: bytes) -> None:
    folder = _written(data, "config.json", "generation_config.json")
    judged(lambda: check_architecture(folder), CheckpointError)
    judged(lambda: load_model_config(folder, load_format="dummy"), CheckpointError)


@st.composite
def _adapter_weights(draw: st.DrawFn) -> bytes:
    rank = draw(st.sampled_from([0, 1, 2, 8]))
    header, end = {}, 0
    for module in draw(
        st.lists(st.sampled_from(["q_proj", "mlp.up_proj"]), min_size=1, max_size=2, unique=True)
    ):
        for letter, shape in (("A", [rank, 4]), ("B", [4, rank])):
            size = 4 * math.prod(shape)
            name = f"base_model.model.model.layers.0.{module}.lora_{letter}.weight"
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
            end += size
    return draw(damaged(st.just(_stored(draw(altered(header, 1)), bytes(end))), 1))


_ADAPTER = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4.0,
    "bias": "none",
    "use_rslora": False,
    "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {},
    "modules_to_save": None,
}


def _check_adapter(data: bytes) -> None:
    folder = _written(data, "adapter_config.json", "adapter_model.safetensors")
    found = judged(lambda: read_adapter(folder, 8), CheckpointError)
    for name, module in found.modules.items() if found is not None else ():
        if not math.isfinite(module.scale):
            raise Fault(f"{name} is multiplied by {module.scale}")


_OTHER_CONFIGS = [
    {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "sliding_window": 64},
    {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
]


def _configs() -> st.SearchStrategy[bytes]:
    base = _demo_json("config.json")
    return documents(base, *({**base, **other} for other in _OTHER_CONFIGS), most=3)


TARGETS = [
    Target(name="safetensors", inputs=_tensors(), check=_check_safetensors, examples=800),
    Target(name="gguf", inputs=_gguf(), check=_check_gguf, examples=800),
    Target(
        name="tokenizer_json",
        inputs=files(
            tokenizer__json=st.deferred(lambda: documents(_demo_json("tokenizer.json"), most=2)),
            tokenizer_config__json=st.deferred(
                lambda: documents(_demo_json("tokenizer_config.json"), most=2)
            ),
            special_tokens_map__json=JSON.map(json_bytes),
        ),
        check=_check_tokenizer,
        examples=150,
    ),
    Target(
        name="tiktoken",
        inputs=files(
            tiktoken__model=_tiktoken(),
            tokenizer_config__json=documents(
                {"added_tokens_decoder": {"300": {"content": "<|im_end|>", "special": True}}}
            ),
        ),
        check=partial(_check_vocabulary, read_kimi, "tiktoken.model"),
        examples=100,
    ),
    Target(
        name="tekken",
        inputs=files(tekken__json=_tekken()),
        check=partial(_check_vocabulary, read_tekken, "tekken.json"),
        examples=150,
    ),
    Target(
        name="model_config",
        inputs=files(
            config__json=st.deferred(_configs),
            generation_config__json=documents(
                {"eos_token_id": [1, 2], "temperature": 0.6, "top_p": 0.9, "top_k": 20}
            ),
        ),
        check=_check_config,
        examples=500,
    ),
    Target(
        name="adapter",
        inputs=files(
            adapter_config__json=documents(_ADAPTER, most=2),
            adapter_model__safetensors=_adapter_weights(),
        ),
        check=_check_adapter,
        examples=500,
    ),
]
