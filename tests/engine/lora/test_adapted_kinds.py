"""Adapters beside what else an engine can do: weights in few bits, beams and images. The answers
are those of merged models, token for token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.contracts.messages import EngineCoreRequest
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import BeamParams, SamplingParams
from engine.images.image_config import ImageConfig
from engine.models.adapters.adapter_files import AdapterError, read_adapter
from tests.engine.images import vision_checkpoints as vision
from tests.engine.lora.adapted_engine import MAX_RANK, Adapted, adapted, request
from tests.engine.lora.adapter_checkpoints import ALL, AdapterShape, write_adapter
from tests.engine.lora.test_adapted_engine import serve
from tests.engine.models import int4_checkpoints as int4
from tests.engine.models.quantised_checkpoints import (
    FP8_BLOCKS,
    Writer,
    quantise_checkpoint,
    write_fp8_blocks,
)
from tests.engine.models.reference_models import FAMILIES, save_checkpoint
from tests.engine.models.test_int4_weights import packed_on_cpu  # noqa: F401
from tests.engine.worker.one_engine import OneEngine, check_empty

FORMATS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "fp8": (write_fp8_blocks((128, 128)), FP8_BLOCKS),
    "int4": int4.LAYOUTS["awq"],
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.usefixtures("packed_on_cpu")
def test_adapters_of_quantised_weights_answer_as_merged_into_what_they_mean(
    name: str, tmp_path: Path
) -> None:
    writer, config = FORMATS[name]
    save_checkpoint(FAMILIES["llama"], tmp_path / "saved")
    quantised = tmp_path / "quantised"
    quantise_checkpoint(tmp_path / "saved", quantised, tmp_path / "model", writer, config)
    models = adapted(tmp_path, AdapterShape(1), AdapterShape(2, rank=16))
    engine = serve(models, models.config(quantised, lora=models.lora()), [0, None, 1, 0])
    check_empty(engine)


def test_a_beam_search_has_the_adapter_of_its_request(
    adapted_family: Callable[[str], Adapted],
) -> None:
    models = adapted_family("llama")
    beam = BeamParams(3, 1.0, early_stopping=False)

    def searches() -> list[EngineCoreRequest]:
        made = [request(f"b{i}", seed=2 * i, temperature=0.0, beam=beam) for i in range(3)]
        return [msgspec.structs.replace(one, eos_token_ids=(40, 41, 42)) for one in made]

    who = [0, None, 1]
    engine = OneEngine(models.config(lora=models.lora()), 2)
    for message, index in zip(searches(), who, strict=True):
        engine.add(models.with_adapter(message, index))
        engine.add(models.with_adapter(request(f"plain-{index}", seed=4), index))
    engine.finish()
    for message, index in zip(searches(), who, strict=True):
        assert engine.tokens[message.request_id] == models.expected(message, index)
        plain = request("plain", seed=4)
        assert engine.tokens[f"plain-{index}"] == models.expected(plain, index)
    assert engine.scheduler.check_empty() == []


def test_answers_about_images_have_adapters_of_the_text_model(tmp_path: Path) -> None:
    vision.save_checkpoint("qwen2_5", tmp_path / "model")
    shape = AdapterShape(1, within="model.layers")
    models = adapted(tmp_path, shape)
    picture = vision.picture("qwen2_5", 4, 5, 1)
    images = ImageConfig(max_images=4, has_encoder=True, max_image_tokens=54)

    def ask(folder: Path | None, who: list[int | None], **changes: Any) -> dict[str, list[int]]:
        engine = OneEngine(models.config(folder, images=images, **changes), 2)
        for number, index in enumerate(who):
            asked = vision.prompt([picture] if number < 2 else [], 3)
            spec = RequestSpec(
                asked.tokens, SamplingParams(temperature=0.0, max_tokens=12), images=asked.spans
            )
            message = EngineCoreRequest(request_id=f"{number}", spec=spec, pixels=asked.pixels)
            engine.add(models.with_adapter(message, index))
        engine.finish()
        check_empty(engine)
        return engine.tokens

    plain, merged = ask(None, [None] * 3), ask(tmp_path / "merged-0", [None] * 3)
    both = ask(None, [0, None, 0], lora=models.lora())
    assert both["0"] == merged["0"] != plain["0"]
    assert both["1"] == plain["1"]
    assert both["2"] == merged["2"]
    write_adapter(tmp_path / "tower", models.model, AdapterShape(2, within="visual", targets=ALL))
    engine = OneEngine(models.config(images=images, lora=models.lora()), 1)
    with pytest.raises(AdapterError, match="adapts .*visual.*merge it into the model"):
        digest = read_adapter(tmp_path / "tower", MAX_RANK).digest
        engine.worker.load_adapter(digest, str(tmp_path / "tower"))
    engine.worker.shutdown()
