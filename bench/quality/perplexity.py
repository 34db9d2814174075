"""Perplexity of a model as it is served, with each kind of quantisation.

    python -m bench.quality.perplexity                      # the demo checkpoint, on this machine
    python -m bench.quality.perplexity --model FOLDER --text FILE --device cuda

The engine computes log probabilities of texts that the model has not been trained on: long
documents of the demo's corpus by another seed, or the text of a file, in pieces. Everything reads
the cache (`attention_backend` triton), so an FP8 cache is seen, of a prompt as of an answer. On CPU
quantised weights are computed with by their meaning; on a GPU inputs of FP8 layers are rounded.
Writes bench/results/perplexity-NAME-DEVICE.json and prints a table.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import get_args

from bench.demo_model.corpus import documents
from bench.quality.round_to_int4 import write_int4
from bench.record import write_result
from engine.config import (
    CacheConfig,
    Device,
    DeviceConfig,
    Dtype,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.core.core import EngineCore
from engine.executor.uniproc_executor import UniprocExecutor
from engine.frontend.tokenizer import Tokenizer
from engine.kv_scales import KVScaleTable
from engine.models.checkpoint import load_model_config
from engine.models.kv_scale_files import choose_kv_scales
from engine.node.settings import detect_device

DEMO = Path(__file__).parents[2] / "cli" / "demo_checkpoint"
UNSEEN_SEED = 987_654
"""Documents are drawn by it; those of the training were by another."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Names a way to run the model.

    Attributes:
        weights: plain, fp8 (rounded as they are loaded) or int4.
        kv: plain, fp8 (with scales of the checkpoint, else 1.0) or calibrated.
    """

    name: str
    dtype: Dtype
    weights: str = "plain"
    kv: str = "plain"


VARIANTS = (
    Variant("float32", "float32"),
    Variant("bfloat16", "bfloat16"),
    Variant("FP8 weights", "bfloat16", weights="fp8"),
    Variant("FP8 KV, scales 1.0", "bfloat16", kv="fp8"),
    Variant("FP8 KV, calibrated", "bfloat16", kv="calibrated"),
    Variant("FP8 weights and KV", "bfloat16", weights="fp8", kv="fp8"),
    Variant("4-bit weights", "bfloat16", weights="int4"),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table.

    Attributes:
        nats: Mean negative log probability of a token.
        over_first: How much higher the perplexity is than the first variant's, as a part of it.
        moved: Mean change of a token's log probability against the first variant's, either way.
    """

    variant: str
    nats: float
    perplexity: float
    over_first: float
    moved: float


class Perplexity:
    """Measures one model on one list of texts."""

    def __init__(self, folder: Path, texts: list[list[int]], device: Device) -> None:
        self._folder = folder
        self._texts = texts
        self._device = device

    def logprobs(
        self, variant: Variant, int4_folder: Path, scales_file: Path | None
    ) -> list[float]:
        """Returns the log probabilities of all tokens but the first of each text, in order."""
        folder = int4_folder if variant.weights == "int4" else self._folder
        model = load_model_config(
            folder,
            dtype=variant.dtype,
            quantization="fp8" if variant.weights == "fp8" else None,
            max_model_len=1 + max(map(len, self._texts)),
        )
        scales = None
        if variant.kv != "plain":
            scales = choose_kv_scales(model, "fp8")
        if variant.kv == "calibrated":
            assert scales_file is not None
            scales = choose_kv_scales(model, "fp8", scales_file)
        return self._run(self._config(model, scales))

    def _config(self, model: ModelConfig, scales: KVScaleTable | None) -> EngineConfig:
        blocks = 8 * (model.max_model_len // 16 + 2)
        return EngineConfig(
            engine_id="perplexity",
            epoch=1,
            model=model,
            cache=CacheConfig(num_blocks=blocks, enable_prefix_caching=False, kv_scales=scales),
            scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=2048),
            device=DeviceConfig(
                device=self._device, enforce_eager=True, attention_backend="triton"
            ),
        )

    def _run(self, config: EngineConfig) -> list[float]:
        executor = UniprocExecutor(config)
        core = EngineCore(config, executor, lambda *_: None)
        found: list[list[float]] = [[] for _ in self._texts]
        try:
            for index, text in enumerate(self._texts):
                sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
                spec = RequestSpec(text, sampling)
                core.handle(EngineCoreRequest(request_id=str(index), spec=spec))
            while not core.is_idle:
                for output in core.step().outputs:
                    if output.prompt_logprobs is not None:
                        part = output.prompt_logprobs.unpack()
                        found[int(output.request_id)] += [token.logprobs[0] for token in part]
        finally:
            core.shutdown()
            executor.shutdown()
        return [logprob for of_text in found for logprob in of_text]


def read_texts(folder: Path, text: Path | None, num_tokens: int, length: int) -> list[list[int]]:
    """Returns texts of `length` tokens at most, until they are `num_tokens` together."""
    tokenizer = Tokenizer.of_model(load_model_config(folder))
    texts: list[list[int]] = []
    if text is not None:
        tokens = tokenizer.encode(text.read_text("utf-8"))
        texts = [tokens[start : start + length] for start in range(0, len(tokens), length)]
    else:
        for document in islice(documents(UNSEEN_SEED, long=True), num_tokens):
            texts.append(tokenizer.encode(document, add_special_tokens=False)[:length])
            if sum(map(len, texts)) >= num_tokens:
                break
    texts = [tokens for tokens in texts if len(tokens) > 1]
    while len(texts) > 1 and sum(map(len, texts[:-1])) >= num_tokens:
        texts.pop()
    return texts


def measure(
    folder: Path, texts: list[list[int]], device: Device, scales_file: Path | None
) -> list[Figure]:
    """Measures all variants; calibrated ones with a file only."""
    figures: list[Figure] = []
    first: list[float] = []
    measured = Perplexity(folder, texts, device)
    with tempfile.TemporaryDirectory() as scratch:
        int4_folder = Path(scratch) / "int4"
        write_int4(folder, int4_folder)
        for variant in VARIANTS:
            if variant.kv == "calibrated" and scales_file is None:
                continue
            found = measured.logprobs(variant, int4_folder, scales_file)
            first = first or found
            figures.append(_figure(variant, found, first))
            print(_line(figures[-1]), flush=True)
    return figures


def _figure(variant: Variant, found: list[float], first: list[float]) -> Figure:
    count = len(first)
    nats = -math.fsum(found) / count
    moved = math.fsum(abs(a - b) for a, b in zip(found, first, strict=True)) / count
    over = math.expm1(nats + math.fsum(first) / count)
    return Figure(variant.name, nats, math.exp(nats), over, moved)


def _line(figure: Figure) -> str:
    more = f"{100 * figure.over_first:+9.3f} %{figure.moved:9.4f}"
    return f"{figure.variant:22}{figure.perplexity:10.4f}{more}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=DEMO, help="folder of a plain checkpoint")
    parser.add_argument("--text", type=Path, help="default: documents of the demo's corpus")
    parser.add_argument("--num-tokens", type=int, default=20_000)
    parser.add_argument("--length", type=int, default=1024, help="tokens of one text at most")
    parser.add_argument("--kv-cache-scales", type=Path, help="written by `tandem calibrate-kv`")
    parser.add_argument("--device", choices=["auto", *get_args(Device)], default="auto")
    arguments = parser.parse_args(argv)
    device = detect_device() if arguments.device == "auto" else arguments.device
    texts = read_texts(arguments.model, arguments.text, arguments.num_tokens, arguments.length)
    num_tokens = sum(len(text) - 1 for text in texts)
    print(f"{num_tokens} tokens in {len(texts)} texts, on {device}")
    print(f"{'':22}perplexity     more    moved")
    figures = measure(arguments.model, texts, device, arguments.kv_cache_scales)
    name = arguments.model.resolve().name
    result = {
        "model": name,
        "device": device,
        "num_tokens": num_tokens,
        "figures": [asdict(figure) for figure in figures],
    }
    print(write_result(f"perplexity-{name}-{device}", result))


if __name__ == "__main__":
    sys.exit(main())
