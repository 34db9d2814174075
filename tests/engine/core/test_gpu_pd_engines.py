"""Prefill and decode engines on one GPU give the tokens of one engine, over either transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest
import pytest_asyncio

from engine.config import DeviceConfig, EngineConfig
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.frontend.async_llm import AsyncLLM
from engine.frontend.input_processor import GenerationRequest
from engine.kv_scales import KVScaleTable
from engine.models.quantization.fp8 import ONLINE
from engine.quantization import Quantization
from kv_transfer.config import KVRole, KVTransferConfig
from kv_transfer.metadata import KVTransferParams
from tests.engine.core.pd_pair import other_role
from tests.engine.core.tiny_engine import VOCAB, tiny_config, until
from tests.processes import is_gone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="module"),
]

LENGTHS = [1, 7, 8, 9, 40, 63, 64, 65, 130, 200]


@dataclass(frozen=True)
class Form:
    """Says what numbers an engine keeps."""

    kv_scales: KVScaleTable | None = None
    weights: Quantization | None = None


BFLOAT16, FP8_CACHE, FP8_WEIGHTS = Form(), Form(KVScaleTable()), Form(weights=ONLINE)
FP8_BOTH = Form(KVScaleTable(), ONLINE)
FORMS = {"bfloat16": BFLOAT16, "fp8 cache": FP8_CACHE, "fp8 weights": FP8_WEIGHTS, "fp8": FP8_BOTH}


def config(
    kv_role: KVRole | None,
    transport: str = "auto",
    *,
    deterministic: bool = False,
    form: Form = BFLOAT16,
) -> EngineConfig:
    """A budget of 64 tokens cuts longer prompts into chunks."""
    base = tiny_config(
        hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=64, num_layers=3, max_model_len=256,
        dtype="bfloat16", async_scheduling=True, quantization=form.weights,
    )  # fmt: skip
    transfer = None
    if kv_role is not None:
        transfer = KVTransferConfig(
            kv_role=kv_role, num_streams=2, transports=transport, staging_bytes=32 << 20
        )
    return replace(
        base,
        cache=replace(
            base.cache, num_blocks=512, enable_prefix_caching=False, kv_scales=form.kv_scales
        ),
        device=DeviceConfig(device="cuda", enforce_eager=True, deterministic=deterministic),
        kv_transfer=transfer,
    )


def request(name: str, length: int, **sampling: object) -> GenerationRequest:
    prompt = [1 + (length * 31 + i * 7) % (VOCAB - 1) for i in range(length)]
    settings = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, **sampling}
    return GenerationRequest(name, RequestSpec(prompt, SamplingParams(**settings)))


async def tokens_of(llm: AsyncLLM, wanted: GenerationRequest) -> list[int]:
    return [token async for output in llm.generate(wanted) for token in output.token_ids]


async def joined_tokens(prefill: AsyncLLM, decode: AsyncLLM, number: int, length: int) -> list[int]:
    """Returns the answer to a prompt that one engine computes and the other goes on with."""
    export, pull = request(f"r{number}", length, max_tokens=1), request(f"r{number}", length)
    export.kv_transfer_params = KVTransferParams(
        do_remote_decode=True, transfer_id=f"{number:032x}"
    )
    pull.kv_transfer_params = KVTransferParams(
        do_remote_prefill=True, transfer_id=f"{number:032x}", peer=prefill.ready.peer
    )
    stream = decode.generate(pull)
    async for output in prefill.generate(export):
        for token_id in output.token_ids:
            decode.supply_first_token(pull.request_id, token_id)
    received = await decode.wait_kv_result(pull.request_id)
    assert received.ok, received
    assert (await prefill.wait_kv_result(export.request_id)).ok
    return [token async for output in stream for token in output.token_ids]


async def ended(llm: AsyncLLM) -> None:
    pids = [llm.core_pid, *llm.ready.worker_pids, *llm.ready.transfer_pids]
    await llm.shutdown()
    await until(lambda: all(is_gone(pid) for pid in pids), "the end of all processes")


Answers = dict[int, list[int]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_node() -> AsyncIterator[dict[Form, Answers]]:
    """Returns one node's answers by prompt length."""
    answers = {}
    for form in FORMS.values():
        llm = await AsyncLLM.start(config(None, form=form))
        answers[form] = {
            length: await tokens_of(llm, request(f"o{length}", length)) for length in LENGTHS
        }
        await ended(llm)
    yield answers


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("transport", ["cuda_ipc,stream", "stream"])
async def test_two_engines_on_one_gpu_equal_one(
    one_node: dict[Form, Answers], transport: str, form: Form
) -> None:
    prefill, decode = await asyncio.gather(
        AsyncLLM.start(config("kv_producer", transport, form=form)),
        AsyncLLM.start(config("kv_consumer", transport, form=form)),
    )
    for number, length in enumerate(LENGTHS):
        found = await joined_tokens(prefill, decode, number, length)
        assert found == one_node[form][length], length
    for llm in (prefill, decode):
        await until(lambda: llm.stats.kv_transfer["live_transfers"] == 0, "no transfer")  # noqa: B023
        await ended(llm)


@pytest.mark.parametrize("transport", ["cuda_ipc,stream", "stream"])
async def test_engines_on_a_gpu_change_places_with_their_weights_and_graphs(
    transport: str,
) -> None:
    """Answers stay what they were before the first change. Marks of layers are written into another
    page then, the cache is mapped by other processes, and graphs that were recorded before are
    replayed."""
    recorded = DeviceConfig(device="cuda")
    engines = await asyncio.gather(
        *(
            AsyncLLM.start(replace(config(role, transport), device=recorded))
            for role in ("kv_producer", "kv_consumer")
        )
    )
    workers = [llm.ready.worker_pids for llm in engines]
    answers: Answers = {}
    for first in (0, 100, 200):
        prefill, decode = sorted(engines, key=lambda llm: not llm.config.is_producer)
        for number, length in enumerate(LENGTHS, start=first):
            found = await joined_tokens(prefill, decode, number, length)
            assert found == answers.setdefault(length, found), (first, length)
        switches = (llm.switch_role(other_role(llm.config), None, 10.0) for llm in engines)
        await asyncio.gather(*switches)
    assert [llm.ready.worker_pids for llm in engines] == workers
    for llm in engines:
        await ended(llm)


@pytest.mark.parametrize(
    ("transport", "form"),
    [
        ("cuda_ipc,stream", BFLOAT16),
        ("stream", BFLOAT16),
        ("stream", FP8_CACHE),
        ("stream", FP8_WEIGHTS),
    ],
    ids=["cuda_ipc", "stream", "stream, fp8 cache", "stream, fp8 weights"],
)
async def test_choices_of_one_prompt_are_requests_with_their_seeds(
    transport: str, form: Form
) -> None:
    """The prompt is computed once and pulled once; its last block is copied on the device, or all
    of it is full. Alone, the decode engine computes the whole request."""
    prefill, decode = await asyncio.gather(
        AsyncLLM.start(config("kv_producer", transport, deterministic=True, form=form)),
        AsyncLLM.start(config("kv_consumer", transport, deterministic=True, form=form)),
    )
    for number, length in enumerate([7, 64, 200]):
        choices = [request(f"c{number}.{i}", length, temperature=1.0, seed=i) for i in range(5)]
        pull = GenerationRequest.of_choices(f"c{number}", choices)
        export = replace(pull, spec=pull.spec.for_one_token(), choice_ids=())
        export.kv_transfer_params = KVTransferParams(
            do_remote_decode=True, transfer_id=f"{number:032x}"
        )
        pull.kv_transfer_params = KVTransferParams(
            do_remote_prefill=True, transfer_id=f"{number:032x}", peer=prefill.ready.peer
        )
        stream = decode.generate(pull)
        async for output in prefill.generate(export):
            for token_id in output.token_ids:
                decode.supply_first_token(pull.request_id, token_id, siblings=output.siblings)
        assert (await decode.wait_kv_result(pull.request_id)).ok
        found: dict[str, list[int]] = {name: [] for name in pull.choice_ids}
        async for output in stream:
            found[output.request_id] += output.token_ids
        assert len({tuple(tokens) for tokens in found.values()}) == 5
        for choice in choices:
            alone = await tokens_of(decode, replace(choice, request_id="alone"))
            assert found[choice.request_id] == alone, (length, choice.request_id)
    for llm in (prefill, decode):
        await until(lambda: llm.stats.kv_transfer["live_transfers"] == 0, "no transfer")  # noqa: B023
        await ended(llm)
