"""Images in the scheduler: what a step encodes, how long embeddings are kept, where chunks end, and
what becomes of requests whose images nobody here can encode."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest

from engine.config import EngineConfig
from engine.contracts.messages import EngineCoreRequest
from engine.contracts.outputs import ImageStats
from engine.contracts.request import Request, RequestStatus
from engine.contracts.request_spec import IDLE_PRIORITY, RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.contracts.scheduler_output import EncodingOutput, SchedulerOutput
from engine.contracts.steps.step_launches import LaunchTime, StepLaunches
from engine.images.image_config import ImageConfig
from engine.images.image_input import ImagePixels, ImageSpan, image_digest
from engine.images.image_limits import ImageLimits
from engine.images.vision_spec import BlockSpec, PixelSpec, VisionSpec
from engine.kv_cache.block_hash import extend_block_hashes
from engine.models.recorded_steps import prompt_keys
from engine.sched.rows.image_encoding import ImageEncoding
from tests.engine.sched.factories import make_config, make_request, remote_prefill
from tests.engine.sched.step_machine import StepMachine

IMAGE = 9
VISION = VisionSpec(
    names={},
    block=BlockSpec(norm="rms", activation="silu"),
    patch_shape=(3, 2, 1, 1),
    depth=1,
    hidden_size=8,
    intermediate_size=8,
    num_heads=1,
    out_hidden_size=8,
    pixels=PixelSpec(patch_size=1, max_pixels=4 * 24),
    image_token_id=IMAGE,
    rope_axes=(0, 1, 2, 2),
)


def config_of(
    *, has_encoder: bool = True, budget: int = 24, cache: int = 0, **scheduler: float
) -> EngineConfig:
    config = make_config(**{"max_num_batched_tokens": 32, "max_num_seqs": 6, **scheduler})
    images = ImageConfig(
        max_images=8, has_encoder=has_encoder, encoder_budget=budget, cache_tokens=cache
    )
    return replace(config, model=replace(config.model, vision=VISION), images=images)


def pixels_of(name: str, rows: int, columns: int) -> ImagePixels:
    return ImagePixels(image_digest(rows, columns, name.encode()), rows, columns, name.encode())


def request_of(
    request_id: str, *images: ImagePixels, num_text: int = 4, max_tokens: int = 3, kv: bool = False
) -> Request:
    """Makes a request: text, then each image with text behind it."""
    tokens = [1] * num_text
    spans = []
    for image in images:
        spans.append(ImageSpan(len(tokens), image.rows, image.columns, image.digest))
        tokens += [IMAGE] * spans[-1].num_tokens + [2] * num_text
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(
        EngineCoreRequest(
            request_id=request_id,
            spec=RequestSpec(tokens, sampling, images=tuple(spans)),
            pixels=() if kv else tuple({image.digest: image for image in images}.values()),
            kv_transfer_params=remote_prefill(f"t-{request_id}") if kv else None,
        )
    )


def encoded(step: SchedulerOutput | None) -> list[bytes]:
    """Returns what was encoded, by the content of each image."""
    if not isinstance(step, EncodingOutput):
        return []
    return [image.patches for image in step.images.encoded]


A, B, C = pixels_of("a", 3, 4), pixels_of("b", 3, 4), pixels_of("c", 4, 6)


def encoding_of(**changes: int) -> ImageEncoding:
    return ImageEncoding(ImageLimits(config_of(**changes)))


def test_a_chunk_ends_before_an_image_beyond_the_budget() -> None:
    encoding = encoding_of(budget=24)
    request = request_of("r", A, B, C)
    assert encoding.limit(request, 0, 100) == request.spec.images[2].offset
    work = encoding.take_work()
    assert work is not None and [image.patches for image in work.encoded] == [b"a", b"b"]
    rest = request.spec.images[2].offset
    assert encoding.limit(request, rest, 100) == 100
    assert encoding.limit(request_of("other", C), 0, 100) == 100, "held: costs no budget"


def whole_config(**changes: int) -> EngineConfig:
    """Returns that of a model that computes each image at once."""
    config = config_of(**changes)
    return replace(config, model=replace(config.model, vision=replace_vision(sees_whole=True)))


def replace_vision(**changes: bool) -> VisionSpec:
    return msgspec.structs.replace(VISION, **changes)


def test_an_image_that_is_computed_at_once_is_not_cut() -> None:
    encoding = ImageEncoding(ImageLimits(whole_config()))
    request = request_of("r", A)
    start, end = request.spec.images[0].offset, request.spec.images[0].end
    assert encoding.limit(request, 0, start + 5, 32) == start, "the chunk ends before it"
    assert encoding.limit(request, start, 5, 32) == end - start, "more than the part, all of it"
    assert encoding.limit(request, start, 5, 11) == 0, "the step is too full; the next has room"
    assert encoding.limit(request, start + 3, 2, 32) == end - start - 3, "behind a cached prefix"
    assert encoding.limit(request, 0, 100, 32) == 100


def test_images_that_never_fit_into_a_step_are_refused() -> None:
    wide = request_of("r", C)
    assert ImageLimits(whole_config()).refusal(wide) == ""
    small = whole_config(max_num_batched_tokens=28)
    assert "--max-num-batched-tokens" in ImageLimits(small).refusal(wide)
    assert ImageLimits(config_of(max_num_batched_tokens=28)).refusal(wide) == ""


def test_steps_take_whole_images_whatever_their_part() -> None:
    """Parts are of 5 tokens, and none ends inside an image."""
    config = whole_config(long_prefill_token_threshold=5)
    machine = StepMachine(config, num_blocks=64, depth=2, seed=3)
    for name in "rstu":
        machine.add(request_of(name, A, B, num_text=7))
    images: dict[int, tuple[ImageSpan, ...]] = {}
    computed: dict[int, int] = {}
    while (step := machine.step()) is not None:
        for new in step.new_reqs:
            images[new.row], computed[new.row] = new.images, new.num_computed_tokens
        for row, count in step.prefill_chunks:
            end = computed[row] = computed[row] + count
            assert not [one for one in images[row] if one.offset < end < one.end]
    assert set(computed.values()) == {45}
    machine.finish()
    assert machine.scheduler.check_empty() == []


def test_an_image_is_encoded_once_for_all_who_send_it() -> None:
    encoding = encoding_of()
    first, second = request_of("r", A), request_of("s", A)
    encoding.limit(first, 0, 8)
    assert encoding.take_work() is not None
    encoding.limit(second, 0, 8)
    assert encoding.take_work() is None
    encoding.passed(first, first.num_tokens)
    encoding.passed(second, 8)
    assert encoding.leftovers() == ["image embeddings held by s"]
    encoding.leave("s")
    assert encoding.leftovers() == []
    encoding.limit(request_of("t", A), 0, 8)
    assert encoding.take_work() is None, "kept though nobody referred to it"
    assert encoding.stats() == ImageStats(num_queries=3, num_hits=2, num_encoded_tokens=12)


def test_the_one_unused_for_longest_makes_room_and_none_in_use() -> None:
    encoding = encoding_of(cache=36)
    for name, image in (("r", A), ("s", B), ("t", A)):
        encoding.limit(request_of(name, image), 0, 8)
        if name != "t":
            encoding.leave(name)
        encoding.take_work()
    assert encoding.limit(request_of("u", C), 0, 8) == 8
    work = encoding.take_work()
    assert work is not None and work.dropped == (B.digest,)
    assert encoding.num_held_tokens == 36
    assert encoding.limit(request_of("v", B), 0, 8) == 4, "all that is held is in use"
    assert encoding.take_work() is None


def test_nobody_keeps_an_image_for_when_it_comes_again() -> None:
    """Two prompts that did would wait for each other, and one for itself."""
    config = config_of(cache=24)
    machine = StepMachine(config, 60, depth=2)
    for name, image in (("r", A), ("s", B)):
        machine.add(request_of(name, image, C, image))
    machine.finish()
    machine.check_all_done()


@pytest.mark.parametrize("others_decode", [False, True])
def test_the_idle_class_keeps_no_image_from_others(others_decode: bool) -> None:
    """Its chunk ended inside an image: it goes on to the end of that, beside a prompt of others
    that waits for room."""
    config = config_of(cache=24, long_prefill_token_threshold=6, itl_objective_ms=1e-6)
    machine = StepMachine(config, 60)
    if others_decode:
        machine.add(request_of("decode", max_tokens=60))
        machine.step()
    batch = request_of("batch", C)
    batch.spec = msgspec.structs.replace(batch.spec, priority=IDLE_PRIORITY)
    machine.add(batch)
    machine.step()
    client = machine.add(request_of("prompt", A))
    for _ in range(12):
        machine.step()
    assert client.tokens
    machine.finish()
    machine.check_all_done()


def test_no_step_drops_what_it_reads_itself() -> None:
    """Workers drop first, then encode, then read."""
    encoding = encoding_of(cache=24)
    for name, image in (("r", A), ("s", B), ("t", A)):
        request = request_of(name, image)
        assert encoding.limit(request, 0, 20) == 20
        encoding.passed(request, 20)
        if name == "r":
            encoding.take_work()
    late = request_of("u", pixels_of("d", 3, 4))
    assert encoding.limit(late, 0, 20) == 4, "one is read in this step, one is encoded for it"
    work = encoding.take_work()
    assert work is not None and work.dropped == ()
    assert [image.patches for image in work.encoded] == [b"b"]
    assert encoding.limit(late, 4, 16) == 16
    work = encoding.take_work()
    assert work is not None and work.dropped == (B.digest,)


@pytest.mark.parametrize("seed", range(12))
def test_workers_have_every_image_that_a_step_reads(seed: int) -> None:
    """Embeddings of one step's images fill the cache, and requests share images."""
    chance = random.Random(seed)
    machine = StepMachine(config_of(cache=24), num_blocks=300)
    images = [pixels_of(str(index), 3, chance.randint(1, 4)) for index in range(6)]
    for index in range(30):
        machine.add(request_of(f"r{index}", *chance.sample(images, chance.randint(0, 3))))
    held: set[bytes] = set()
    of_row: dict[int, tuple[ImageSpan, ...]] = {}
    computed: dict[int, int] = {}
    while (step := machine.step()) is not None:
        for new in step.new_reqs:
            of_row[new.row], computed[new.row] = new.images, new.num_computed_tokens
        if isinstance(step, EncodingOutput):
            assert held >= {*step.images.dropped}
            held -= {*step.images.dropped}
            held |= {image.digest for image in step.images.encoded}
        for row, count in step.prefill_chunks:
            first, computed[row] = computed[row], computed[row] + count
            read = [i for i in of_row[row] if i.offset < first + count and i.end > first]
            assert held >= {image.digest for image in read}
    machine.finish()
    assert machine.scheduler.check_empty() == []


def test_steps_encode_within_the_budget_and_everybody_ends() -> None:
    machine = StepMachine(config_of(cache=24), num_blocks=200, depth=2)
    images = [pixels_of(str(i), 3, 4) for i in range(5)] + [C]
    chance = random.Random(4)
    for index in range(14):
        machine.add(request_of(f"r{index}", *chance.sample(images, chance.randint(0, 3))))
    sizes = []
    for turn in range(400):
        step = machine.step()
        sizes.append(sum(len(encoded(step)) and 12 + 12 * (p == b"c") for p in encoded(step)))
        assert machine.scheduler._running.images.num_held_tokens <= 24
        if turn % 9 == 5:
            machine.abort(f"r{turn // 9}")
    assert max(sizes) == 24
    machine.finish()
    assert machine.scheduler.check_empty() == []


def test_a_prefix_that_is_cached_behind_an_image_needs_no_encoder() -> None:
    machine = StepMachine(config_of(), num_blocks=64, depth=1)
    machine.add(request_of("first", A, num_text=8))
    machine.finish()
    steps = []
    machine.add(request_of("again", A, num_text=8))
    machine.add(request_of("other", B, num_text=8))
    while (step := machine.step()) is not None:
        steps.append(step)
    assert [name for step in steps for name in encoded(step)] == [b"b"]
    machine.finish()


def test_blocks_are_named_by_images_and_their_place() -> None:
    def hashes(*images: ImagePixels, num_text: int = 4) -> list[bytes]:
        return extend_block_hashes(request_of("r", *images, num_text=num_text), 4)

    plain, other = hashes(A), hashes(B)
    assert plain == hashes(A)
    assert plain[0] == other[0], "text before the image"
    assert all(one != two for one, two in zip(plain[1:], other[1:], strict=True))
    turned = pixels_of("a", 4, 3)
    assert hashes(replace_digest(A, turned)) != plain, "another grid has other positions"
    assert hashes(A, B)[-1] != hashes(B, A)[-1]


def replace_digest(image: ImagePixels, grid: ImagePixels) -> ImagePixels:
    return ImagePixels(image.digest, grid.rows, grid.columns, image.patches)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"has_encoder": False}, "no vision encoder"),
        ({"enable_chunked_prefill": False}, "chunked prefill"),
    ],
)
def test_what_can_never_run_is_refused(changes: dict[str, bool], wanted: str) -> None:
    machine = StepMachine(config_of(**changes), num_blocks=64)
    client = machine.add(request_of("r", A))
    assert client.finish_reason == "error" and wanted in client.error


def test_images_too_large_or_without_pixels_are_refused() -> None:
    machine = StepMachine(config_of(), num_blocks=64)
    large = machine.add(request_of("large", pixels_of("x", 5, 6)))
    assert "30 tokens" in large.error and "--max-image-tokens" in large.error
    bare = request_of("bare", A)
    bare.pixels = {}
    assert "pixels" in machine.add(bare).error


def take_stranded(machine: StepMachine) -> list[str]:
    stranded = machine.scheduler.admission.take_stranded()
    machine.take(machine.scheduler.abort_requests(stranded))
    return stranded


def test_a_pull_that_fails_for_good_ends_its_request() -> None:
    """No encoder is here: another node has to go on with it."""
    machine = StepMachine(config_of(has_encoder=False), num_blocks=64, depth=2)
    client = machine.add(request_of("a", A, kv=True))
    machine.step()
    machine.connector.advance("t-a")
    machine.connector.fail("t-a", tells_part=True)
    machine.poll_connector()
    machine.take(machine.scheduler.prefill_locally("a"))
    assert machine.step() is None
    assert take_stranded(machine) == ["a"]
    assert client.finish_reason == "abort"
    machine.finish()
    assert machine.scheduler.check_empty() == []


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_preempted_request_goes_on_only_behind_cached_images(is_cached: bool) -> None:
    """Without their KV it ends here, for another node to go on with it."""
    config = config_of(has_encoder=False, enable_prefix_caching=is_cached)
    machine = StepMachine(config, num_blocks=14, depth=1)
    clients = []
    for name in "ab":
        clients.append(machine.add(request_of(name, A, max_tokens=20, kv=True)))
        machine.step()
        machine.connector.finish(f"t-{name}")
        machine.poll_connector()
        machine.supply_first_token(name)
    stranded: list[str] = []
    for _ in range(60):
        machine.step()
        stranded += take_stranded(machine)
    machine.finish()
    assert machine.scheduler.stats().num_preemptions == 1
    assert stranded == ([] if is_cached else ["b"])
    ends = [client.finish_reason for client in clients]
    assert ends == ["length", "length" if is_cached else "abort"]
    assert machine.scheduler.check_empty() == []


@pytest.mark.parametrize("has_image", [False, True])
def test_a_rest_with_an_image_waits_for_no_graph(has_image: bool) -> None:
    """A step with an image has no graph, so it runs while the layers of what is before it come from
    host memory. A rest of text is computed by a graph, once all of them are here."""
    launches = StepLaunches(prompts=tuple(prompt_keys(6, 64)), one_by_one=LaunchTime(1000))
    machine = StepMachine(config_of(), 13, num_host_slots=64, launches=launches)
    machine.add(request_of("first", num_text=12))
    machine.finish()
    machine.add(make_request("other", [5] * 48, max_tokens=3))
    machine.finish()
    again = request_of("again", A, num_text=12)
    if not has_image:
        again = make_request("again", [*again.spec.prompt_token_ids], max_tokens=3)
    client = machine.add(again)
    machine.schedule()
    assert again.status is RequestStatus.WAITING_FOR_REMOTE_KVS and machine.host is not None
    machine.host.begin_all()
    machine.poll_connector()
    assert (machine.schedule() is not None) == has_image
    machine.finish()
    assert client.tokens == client.expected and machine.num_early == has_image
    assert machine.scheduler.stats().prompt_tokens_loaded == 12
    machine.check_all_done()
