"""Settings of a decode node: those of its engine, and how it serves and finds prefill nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr

from edge.http.settings import HttpEdgeSettings
from engine.contracts.errors import CannotStartError
from engine.contracts.sampling_params import DEFAULT_MAX_LOGPROBS, MAX_LOGPROBS
from engine.models.config.sampling_defaults import read_override
from engine.node.settings.engine_settings import EngineSettings


def _checked_override(text: str) -> str:
    try:
        read_override(text)
    except CannotStartError as error:
        raise ValueError(str(error)) from None
    return text


class DecodeNodeSettings(EngineSettings, HttpEdgeSettings):
    """Serves the OpenAI API: streams tokens, lets prefill nodes compute prompts, or computes them
    itself when there are none."""

    enable_prefix_caching: bool = Field(
        default=False,
        description="Keep KV of finished requests on this node too. Off: every prompt costs "
        "decode the same. On: only KV that is missing here crosses the network, and a node that "
        "serves alone answers conversations faster.",
    )
    port: int = Field(default=8100, ge=0, le=65535, description="HTTP port. 0: any free one.")
    grpc_port: int = Field(
        default=0, ge=0, le=65535, description="Port of load reports and health. 0: any free one."
    )
    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port for /metrics, /health, /health/live, /ready and /steps, always plain "
        "HTTP; the API's port then has no /metrics. 0: any free one. Default: all but /steps and "
        "/health/live are on the API's port alone.",
    )
    prefill: str = Field(
        default="",
        description="Prefill nodes as host:port, comma separated, best first. A router names "
        "better ones with each request, in the header x-prefiller-host-port.",
    )
    trust_router_headers: bool = Field(
        default=True,
        description="Follow x-prefiller-host-port and other headers that only a router may send. "
        "Turn off if clients reach this node without a router: the header makes the node connect "
        "to any address it names.",
    )
    local_prefill_threshold: int = Field(
        default=0,
        ge=0,
        description="Compute prompts on this node if at most this many of their tokens are not "
        "cached here.",
    )
    max_prefill_attempts: int = Field(
        default=3, ge=1, description="Prefill nodes tried before a prompt is computed here."
    )
    handshake_timeout_s: float = Field(
        default=2.0, gt=0, description="Seconds that a prefill node has to answer the first call."
    )
    first_token_timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="Seconds that a prefill node has to compute a prompt, and one more for each "
        "2,500 of its tokens.",
    )
    kv_timeout_s: float = Field(
        default=30.0, gt=0, description="Seconds that KV may take to arrive after the first token."
    )
    api_keys: SecretStr = Field(
        default=SecretStr(""),
        description="Keys that clients may use, comma separated. Empty: no key is required.",
    )
    api_key_file: Path | None = Field(
        default=None, description="File with one key per line, in addition to the others."
    )
    generation_config: str = Field(
        default="auto",
        description="Where requests that do not say get temperature, top_p, top_k, min_p, "
        "repetition_penalty and the longest answer from. auto: generation_config.json of the "
        "checkpoint. none, or vllm: nowhere. Else a folder with that file. All decode nodes "
        "must agree.",
    )
    override_generation_config: Annotated[str, AfterValidator(_checked_override)] = Field(
        default="",
        description="JSON object whose values replace those of --generation-config, such as "
        '{"temperature": 0.6, "max_new_tokens": 1024}.',
    )
    enable_tokenizer_info_endpoint: bool = Field(
        default=False,
        description="Serve GET /tokenizer_info, which tells the checkpoint's tokenizer "
        "configuration and chat template.",
    )
    strict_fields: bool = Field(
        default=False,
        description="Refuse requests with fields that are not known. Off: such fields are "
        "ignored, with one warning in the log for each name, and counted in "
        "tandem_ignored_fields_total. Known fields that are not built are always refused.",
    )
    strict_max_tokens: bool = Field(
        default=False,
        description="Refuse requests for more tokens (max_tokens) than their prompt leaves of the "
        "context, as vLLM does. Off: they get what is left, and finish_reason length says so. "
        "Prompts that are too long are always refused.",
    )
    send_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="Seconds after which a client that reads nothing is disconnected.",
    )
    tool_call_parser: str = Field(
        default="auto",
        description="How this model writes tool calls, by vLLM's name of the parser. `auto` "
        "recognises it in the chat template; `none`: requests with tools are refused.",
    )
    enable_auto_tool_choice: bool = Field(
        default=True,
        description="Let the model choose whether to call a tool. Off: requests with tools are "
        "refused unless their tool_choice is none, required or a function.",
    )
    reasoning_parser: str = Field(
        default="auto",
        description="How this model writes its reasoning, by vLLM's name of the parser. `auto` "
        "recognises it in the chat template; `none` leaves reasoning in the text.",
    )
    reasoning_alias: bool = Field(
        default=True,
        description="Tell reasoning in chats as `reasoning` too, which newer clients read, and not "
        "only as `reasoning_content`.",
    )
    stop_in_reasoning: bool = Field(
        default=True,
        description="Let stop strings of chats end reasoning too. Off: they count in the answer "
        "alone, as hosted APIs have it.",
    )
    enable_force_include_usage: bool = Field(
        default=False,
        description="End every stream of chats and completions with its usage, whether the request "
        "asks for it or not.",
    )
    chat_template: Path | None = Field(
        default=None,
        description="File with a chat template in place of the checkpoint's, for all chats.",
    )
    trust_request_chat_template: bool = Field(
        default=False,
        description="Let requests bring a chat template of their own (`chat_template`). It runs in "
        "a sandbox, but it can keep a processor busy.",
    )
    sanitize_control_tokens: bool = Field(
        default=False,
        description="Read control tokens that users and tools write in chats, such as <|im_end|>, "
        "as the text that they spell, so that turns cannot be forged.",
    )
    system_turns: Literal["first", "in-place"] = Field(
        default="first",
        description="Where turns of the system in /v1/messages stand that come before the first "
        "answer: first, as one message in front of what the user says, or in-place.",
    )
    max_logprobs: int = Field(
        default=DEFAULT_MAX_LOGPROBS,
        ge=0,
        le=MAX_LOGPROBS,
        description="Most likely tokens of which a request may ask log probabilities, for each "
        "token of its answer or prompt.",
    )
    max_answer_logprobs: int = Field(
        default=1 << 22,
        ge=1,
        description="Log probabilities that an answer may have that is not streamed: tokens times "
        "one and the most likely ones, of all answers of a request together.",
    )
    unseen_images: Literal["refuse", "say"] = Field(
        default="refuse",
        description="What becomes of images and videos where the model sees none: the request is "
        "refused, or a text in their place says so to the model. Agents send images that their "
        "tools read, and some of them send a refused one again with each turn.",
    )
    image_workers: int = Field(
        default=2, ge=1, description="Processes that decode and resize images and videos."
    )
    max_image_bytes: int = Field(
        default=8 << 20, ge=1, description="Largest image, as it is sent or fetched."
    )
    max_image_pixels: int = Field(
        default=50_000_000,
        ge=1,
        description="Most pixels of an image or a frame as it is sent; more are refused before it "
        "is decoded.",
    )
    image_timeout_s: float = Field(
        default=10.0, gt=0, description="Seconds that fetching an image may take, and decoding it."
    )
    image_url_hosts: str = Field(
        default="",
        description="Hosts that images and videos may be fetched from by http and https, comma "
        "separated: names, *.name for all below it, with a port where it is not the usual one. "
        "Empty: both come in data: URLs alone.",
    )
    max_video_bytes: int = Field(
        default=64 << 20, ge=1, description="Largest video, as it is sent or fetched."
    )
    max_video_tokens: int = Field(
        default=24_576,
        ge=0,
        description="Frames of a video are made so small that they have at most this many tokens "
        "together. 0: as the checkpoint says.",
    )
    video_timeout_s: float = Field(
        default=60.0, gt=0, description="Seconds that fetching a video may take, and decoding it."
    )
    max_choices: int = Field(
        default=64, ge=1, description="Most answers to one request (prompts times n)."
    )
