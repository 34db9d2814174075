"""Lists the steps that an engine records as CUDA graphs, by its settings. Torch-free."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.contracts.steps.step_launches import GraphKey, LaunchTime, StepLaunches
from engine.contracts.steps.step_shapes import lengths_up_to
from engine.contracts.steps.step_work import ModelCost
from engine.models.registry import spec_of
from engine.models.specs.dense import DenseSpec
from engine.models.step_costs import cost_of
from engine.quantization import Fp8Scheme

PROMPT_TOKENS = (16, 32, 64, 128, 192, 256, 320, 384, 512)
"""Sizes of steps with short prompts. GEMMs compute 64 or 128 rows at a time, so a size that is the
next multiple of that costs little more than the prompt itself; of 448 rows the library's take
longer than of 512."""
LONG_PROMPT_TOKENS = (640, 768, 832, 896, 1024)
"""More sizes. Launched one by one, steps of these take as long at best."""
LONGEST_PROMPT_TOKENS = (1152, 1280, 1408, 1536, 1792, 2048)
"""Still more, at least where ranks share the work of each launch, and where quantised weights are
multiplied sooner."""
MOST_PROMPT_TOKENS = (2560, 3072, 3584, 4096)
"""Larger ones, at least of models with experts: their launches take as long as 4000 tokens do."""
FP8_PROMPT_TOKENS = (4608, 5120, 5632, 6144)
"""The largest, at least of such models with FP8 weights: 48 layers take the host 105 ms to launch,
and the GPU computes 6000 tokens in about 80."""
_ATTENTION_S, _STATE_S, _DENSE_S, _EXPERTS_S = 0.4e-3, 0.55e-3, 0.3e-3, 0.9e-3
"""Seconds in which a host launches what a layer has: by the quicker steps on a host of H200s, whose
slower ones took 1.6 times as long."""
_FLOPS, _EXPERT_FLOPS, _FP8_GAIN = 500e12, 400e12, 1.6
"""FLOPs that an H200 makes in a second of steps with prompts, and what FP8 multiplies that by."""
DRAFTED_PROMPT_TOKENS = (128, 256, 512, 1024)
"""Sizes of steps with prompts beside decodes with drafts."""
PROMPT_REQUESTS = (8, 64)
"""Requests of such a step: few or many."""
MOST_REQUESTS, MOST_REQUESTS_TOKENS = 256, (320, 512, 1024)
"""Requests of some steps that chunks of prompts share with more decodes than 63."""
MOST_DRAFTED_PLACES = 512
"""Places of a recorded step with drafts: float32 logits of 128k tokens take 262 MB. Larger batches
launch their kernels one by one; they take the GPU so long that this costs little."""
_SMALL_SIZES = (1, 2, 4)
_STEPS = ((64, 8), (256, 16), (512, 32), (1 << 30, 64))
"""Pairs (sizes up to, distance between them)."""


def launches_of(config: EngineConfig) -> StepLaunches:
    """Returns what the steps of an engine launch where it runs."""
    if config.device.device == "cpu":
        return StepLaunches(none="a CPU has no graphs")
    return launches_on_gpu(config)


def launches_on_gpu(config: EngineConfig) -> StepLaunches:
    """Returns what they launch on a GPU, also of an engine that is asked about on a CPU."""
    if config.device.enforce_eager:
        return StepLaunches(none="enforce_eager")
    if config.parallel.pipeline_parallel_size > 1:
        return StepLaunches(none="stages record no graphs")
    return recorded_steps(config)


def recorded_steps(config: EngineConfig) -> StepLaunches:
    """Returns what an engine records on a GPU."""
    most, one_by_one = config.scheduler.max_num_seqs, launch_time(config)
    return StepLaunches(
        decodes={
            config.decode_query_len: capture_sizes(config, most),
            **shorter_sizes(config, most),
        },
        prompts=tuple(prompts_to_record(config, longest_prompt(config, one_by_one))),
        most_beside=_most_beside(config),
        one_by_one=one_by_one,
    )


def launch_time(config: EngineConfig) -> LaunchTime:
    """Returns how long the host launches the kernels of a step with prompts one by one. Of a model
    that is not described it is known by the graphs that are worth it alone."""
    spec, cost = spec_of(config.model), cost_of(config)
    if cost is None or not isinstance(spec, DenseSpec):
        return LaunchTime(_longest_at_least(config))
    seconds = _launch_s(spec, config.model.num_layers)
    tokens = round(seconds * _tokens_per_s(config, cost))
    return LaunchTime(tokens, seconds, cost.flops_of_pair / cost.flops_per_token)


def longest_prompt(config: EngineConfig, one_by_one: LaunchTime) -> int:
    """Returns the tokens of the largest step with prompts that is worth a graph: the GPU computes
    them in about the time in which the host launches their kernels one by one."""
    sizes = (size for size in every_prompt_tokens() if size <= one_by_one.tokens)
    return max([_longest_at_least(config), *sizes])


def _longest_at_least(config: EngineConfig) -> int:
    """Returns what was worth it of models of a kind."""
    is_quick = config.parallel.tensor_parallel_size > 1 or config.model.quantization is not None
    if _has_state(config):
        return PROMPT_TOKENS[-1]
    if spec_of(config.model).num_experts_per_token:
        return (FP8_PROMPT_TOKENS if _multiplies_fp8(config) else MOST_PROMPT_TOKENS)[-1]
    return (LONGEST_PROMPT_TOKENS if is_quick else LONG_PROMPT_TOKENS)[-1]


def _tokens_per_s(config: EngineConfig, cost: ModelCost) -> float:
    """Returns the tokens of beginning prompts that the GPU computes in a second."""
    rate = _FLOPS if cost.experts is None else _EXPERT_FLOPS
    if _multiplies_fp8(config):
        rate *= _FP8_GAIN
    return rate / cost.flops_per_token


def _launch_s(spec: DenseSpec, num_layers: int) -> float:
    """Returns the seconds in which the host launches the kernels of a step."""
    states, experts, seconds = spec.states, spec.experts, 0.0
    for layer in range(num_layers):
        if states is not None and layer in states.layers:
            seconds += _STATE_S
        if states is None or states.leaves_attention(layer):
            seconds += _ATTENTION_S
        if layer not in spec.bare_layers:
            is_dense = experts is None or layer in experts.dense_layers
            seconds += _DENSE_S if is_dense else _EXPERTS_S
    return seconds


def prompts_to_record(config: EngineConfig, longest: int) -> list[GraphKey]:
    """Returns the graphs of steps with prompts of a model, smallest first, of up to `longest`
    tokens."""
    device, limits = config.device, config.scheduler
    if device.enforce_eager or not device.allows("prompt-graphs"):
        return []
    if config.parallel.data_parallel_size > 1:
        return []  # Other groups may have other steps at the same time.
    sizes = limits.max_num_seqs, min(longest, limits.max_num_batched_tokens)
    keys = prompt_keys(*sizes, any_context=_cuts_hidden_decodes(config))
    beside = _most_beside(config)
    if beside and _cuts_hidden_decodes(config):
        # The fewer requests a step may have, the finer contexts of latents are cut.
        keys = [key._replace(any_context=key.num_tokens <= beside) for key in keys]
    if _has_state(config):
        return keys  # Decodes with drafts have states that lack tokens, prompts have not.
    longest = min(sizes[1], beside or sizes[1])
    return keys + drafted_keys(limits.max_num_seqs, longest, config.decode_query_len)


def drafted_keys(max_num_reqs: int, max_num_tokens: int, width: int) -> list[GraphKey]:
    """Returns graphs of steps with prompts beside decodes of up to `width` tokens, smallest first.
    They are few: such steps have the tokens of all decodes, and padding costs them little."""
    if width == 1:
        return []
    keys: list[GraphKey] = []
    for num_tokens in DRAFTED_PROMPT_TOKENS:
        most = MOST_REQUESTS if num_tokens > MOST_REQUESTS else PROMPT_REQUESTS[-1]
        num_reqs = min(most, max_num_reqs, MOST_DRAFTED_PLACES // width)
        if num_reqs < num_tokens <= max_num_tokens:
            drafted = GraphKey(num_reqs, num_tokens, True, draft_width=width)
            keys += [drafted, drafted._replace(samples=False)]
    return keys


def _cuts_hidden_decodes(config: EngineConfig) -> bool:
    """Returns whether the model's attention cuts the contexts of decodes in recorded steps with
    prompts as it does without prompts, or never cuts any. What an indexer chooses has kernels of
    its own, which do not; neither does a library."""
    if config.device.deterministic:
        return True
    has_indexer = spec_of(config.model).dense_tokens is not None
    return not has_indexer and config.device.attention_backend != "flash-attn"


def _most_beside(config: EngineConfig) -> int:
    """Returns the tokens of the largest recorded step with prompts beside decodes; 0: as of any.
    Larger ones of latents are whole prompts, which are expanded."""
    expands = spec_of(config.model).latent_shape is not None and not config.device.deterministic
    return PROMPT_TOKENS[-1] if expands else 0


def _has_state(config: EngineConfig) -> bool:
    return any(group.is_state for group in config.kv_layout.groups)


def _multiplies_fp8(config: EngineConfig) -> bool:
    quantization = config.model.quantization
    rules = () if quantization is None else quantization.rules
    return any(isinstance(rule.scheme, Fp8Scheme) for rule in rules)


def prompt_keys(
    max_num_reqs: int, max_num_tokens: int, *, any_context: bool = False
) -> list[GraphKey]:
    """Returns graphs of steps with prompts, smallest first. Those that end with logits, and all
    long ones, are of as many requests as there may be: a few rows of logits more cost less than a
    graph. `any_context`: those of many requests hold decodes of any context, whose two launches a
    layer few short prompts alone are spared."""
    sizes = sorted({min(num_reqs, max_num_reqs) for num_reqs in PROMPT_REQUESTS})
    keys: list[GraphKey] = []
    for num_tokens in every_prompt_tokens():
        fitting = [num_reqs for num_reqs in sizes if num_reqs < num_tokens <= max_num_tokens]
        drawing = fitting if num_tokens <= PROMPT_TOKENS[-1] else fitting[-1:]
        keys += [GraphKey(num_reqs, num_tokens, True) for num_reqs in drawing]
        keys += [GraphKey(num_reqs, num_tokens, False) for num_reqs in fitting[-1:]]
        if fitting and num_tokens in MOST_REQUESTS_TOKENS and max_num_reqs > sizes[-1]:
            most = min(MOST_REQUESTS, max_num_reqs)
            keys += [GraphKey(most, num_tokens, samples) for samples in (True, False)]
    if not any_context:
        return keys
    return [key._replace(any_context=key.num_reqs >= sizes[-1]) for key in keys]


def every_prompt_tokens() -> tuple[int, ...]:
    """Returns the sizes that any model records of steps with prompts, rising."""
    common = PROMPT_TOKENS + LONG_PROMPT_TOKENS + LONGEST_PROMPT_TOKENS
    return common + MOST_PROMPT_TOKENS + FP8_PROMPT_TOKENS


def default_capture_sizes(max_num_reqs: int) -> tuple[int, ...]:
    """Returns sizes that are dense where requests are few and a padded one costs most of a step's
    time; rising, and always with the largest batch.
    """
    sizes = {*_SMALL_SIZES, max_num_reqs}
    size = 0
    for up_to, distance in _STEPS:
        while size + distance <= min(up_to, max_num_reqs):
            size += distance
            sizes.add(size)
    return tuple(sorted(size for size in sizes if size <= max_num_reqs))


def capture_sizes(
    config: EngineConfig, max_num_reqs: int, query_len: int | None = None
) -> tuple[int, ...]:
    """Returns the requests of decode batches that an engine records, rising: of decodes with
    `query_len` tokens; None: with as many as there may be."""
    width = config.decode_query_len if query_len is None else query_len
    most = max_num_reqs
    if width > 1:
        budget = config.scheduler.max_num_batched_tokens
        most = max(1, min(most, min(MOST_DRAFTED_PLACES, budget) // width))
    wanted = config.device.cudagraph_capture_sizes
    return tuple(sorted({size for size in wanted if size <= most})) or default_capture_sizes(most)


def shorter_sizes(config: EngineConfig, max_num_reqs: int) -> dict[int, tuple[int, ...]]:
    """Returns the same of decodes with fewer tokens, by their number, where steps differ in it."""
    if not config.is_adaptive:
        return {}
    lengths = lengths_up_to(config.decode_query_len)[:-1]
    return {length: capture_sizes(config, max_num_reqs, length) for length in lengths}
