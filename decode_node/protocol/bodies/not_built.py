"""Fields that other servers know, that would change the answer, and that are not built.

They are refused by name, while names that nothing knows are ignored: a client that asks for a
sampler and silently gets another one is worse off than one that gets an error. A name that an
API declares as its own field is judged there, so that building one changes nothing here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from decode_node.protocol.bodies.body import StrictBody
from edge.http.errors import BadRequest


class NotBuilt(NamedTuple):
    """Says what to do instead, and which values ask for nothing, besides false and empty ones.
    `asking`: of these, the value that asks for something all the same."""

    advice: str
    neutral: tuple[Any, ...] = ()
    asking: Any = None

    def is_asked_by(self, value: Any) -> bool:
        if self.asking is not None and value == self.asking and type(value) is type(self.asking):
            return True
        return bool(value) and value not in self.neutral


_SAMPLERS = "this sampling method is not built; use temperature, top_p, top_k or min_p"
_ADAPTERS = "name a loaded adapter as `model` instead"
_CODE = "code and parameters of extensions are not taken from requests"
# Completions of both kinds declare all names of it.
_STRUCTURE = (
    "/v1/responses has it as text.format, /v1/messages as output_config.format, "
    "/inference/v1/generate as sampling_params.structured_outputs, /generate as "
    "sampling_params.json_schema, regex, ebnf or structural_tag"
)
_GRAMMAR = "it is called structured_outputs.grammar here"
_DECODING = "it is called structured_outputs here, as in newer vLLM"
_COMPLETIONS = "only /v1/completions and /v1/chat/completions have it"
_OF_FORMS = (_STRUCTURE, _GRAMMAR, _DECODING)
"""Advice in whose place stands that of the API which has other names for it."""
_GIVEN_OUT = "log probabilities are all that is given out besides the answer"
_MEDIA = "see mm_processor_kwargs of /v1/chat/completions"
_CHATS = "only /v1/chat/completions could have it, and it is not built"

NOT_BUILT: dict[str, NotBuilt] = {
    "messages": NotBuilt("send chats to /v1/chat/completions"),
    "prompt": NotBuilt("send prompts to /v1/completions"),
    "use_beam_search": NotBuilt(_COMPLETIONS),
    "best_of": NotBuilt(_COMPLETIONS, (1,)),
    "truncate_prompt_tokens": NotBuilt(_COMPLETIONS),
    "required_prefix_token_ids": NotBuilt("only /v1/chat/completions has it"),
    "suffix": NotBuilt("text before a suffix is not built; put both into the prompt"),
    "echo": NotBuilt("only /v1/completions has it"),
    "audio": NotBuilt("only text is generated"),
    "modalities": NotBuilt("only text is generated", (["text"],)),
    "prompt_embeds": NotBuilt("send the prompt as text or token ids"),
    "input_embeds": NotBuilt("send the prompt as text or token ids"),
    "lora_path": NotBuilt(_ADAPTERS),
    "lora_request": NotBuilt(_ADAPTERS),
    "lora": NotBuilt(_ADAPTERS),
    "adapter_id": NotBuilt(_ADAPTERS),
    "logits_processors": NotBuilt(_CODE),
    "custom_logit_processor": NotBuilt(_CODE),
    "custom_params": NotBuilt(_CODE),
    "vllm_xargs": NotBuilt(_CODE),
    "extra_args": NotBuilt(_CODE),
    "trace_decode_token_ids": NotBuilt("put the tokens into the prompt, and ask prompt_logprobs"),
    "prompt_logprob_token_ids": NotBuilt("prompt_logprobs tells of the most likely tokens"),
    "repetition_detection": NotBuilt("use repetition_penalty or max_tokens"),
    "no_repeat_ngram_size": NotBuilt(_COMPLETIONS),
    "repeat_penalty": NotBuilt("it is called repetition_penalty here", (1, 1.0)),
    "n_predict": NotBuilt("it is called max_tokens here", (-1,)),
    "no_stop_trim": NotBuilt("it is called include_stop_str_in_output here"),
    "grammar": NotBuilt(_GRAMMAR),
    "dry_multiplier": NotBuilt(_SAMPLERS),
    "xtc_probability": NotBuilt(_SAMPLERS),
    "typical_p": NotBuilt(_SAMPLERS, (1, 1.0)),
    "tfs_z": NotBuilt(_SAMPLERS, (1, 1.0)),
    "top_a": NotBuilt(_SAMPLERS),
    "top_n_sigma": NotBuilt(_SAMPLERS, (-1, -1.0)),
    "epsilon_cutoff": NotBuilt(_SAMPLERS),
    "eta_cutoff": NotBuilt(_SAMPLERS),
    "dynatemp_range": NotBuilt(_SAMPLERS),
    "mirostat": NotBuilt(_SAMPLERS),
    "smoothing_factor": NotBuilt(_SAMPLERS),
    "stop_regex": NotBuilt("use stop"),
    "response_format": NotBuilt(_STRUCTURE, ({"type": "text"},)),
    "structured_outputs": NotBuilt(_STRUCTURE),
    "guided_decoding": NotBuilt(_DECODING),
    "guided_json": NotBuilt(_STRUCTURE),
    "guided_regex": NotBuilt(_STRUCTURE),
    "guided_choice": NotBuilt(_STRUCTURE),
    "guided_grammar": NotBuilt(_STRUCTURE),
    "structural_tag": NotBuilt(_STRUCTURE),
    "json_schema": NotBuilt(_STRUCTURE),
    "regex": NotBuilt(_STRUCTURE),
    "ebnf": NotBuilt(_STRUCTURE),
    "tools": NotBuilt(_CHATS),
    "chat_template": NotBuilt("a template of the request is not taken; the checkpoint's is used"),
    "continue_final_message": NotBuilt(_CHATS),
    "mm_processor_kwargs": NotBuilt("only /v1/chat/completions and /tokenize have it"),
    "media_io_kwargs": NotBuilt("only /v1/chat/completions and /tokenize have it"),
    "documents": NotBuilt("put documents into the messages"),
    "thinking_token_budget": NotBuilt("use max_tokens"),
    "reasoning_effort": NotBuilt("see chat_template_kwargs", ("none",)),
    "verbosity": NotBuilt("ask for it in the messages", ("medium",)),
    "web_search_options": NotBuilt("this server searches nothing", asking={}),
    "moderation": NotBuilt(
        "this server moderates nothing; ask a model that does, before and after"
    ),
    "compaction": NotBuilt("this server summarises nothing by itself; ask for it in a message"),
    "return_hidden_states": NotBuilt(_GIVEN_OUT),
    "return_routed_experts": NotBuilt(_GIVEN_OUT),
    "return_sampling_mask": NotBuilt(_GIVEN_OUT),
    "return_entropy": NotBuilt(_GIVEN_OUT),
    "return_weight_versions": NotBuilt("new weights are adapters, which have names"),
    "return_prompt_text": NotBuilt("/tokenize and /detokenize tell what a prompt becomes"),
    "return_prompt_token_ids": NotBuilt("it is called return_token_ids here"),
    "return_input_ids_in_sglext": NotBuilt("it is called return_token_ids here"),
    "return_output_ids_in_sglext": NotBuilt("it is called return_token_ids here"),
    "watermarking": NotBuilt("answers have no watermark"),
    "watermark": NotBuilt("answers have no watermark"),
    "input_ids": NotBuilt("send token ids to /generate or /inference/v1/generate"),
    "session_params": NotBuilt("send the whole prompt; what is cached of it is found"),
    "previous_input_messages": NotBuilt("send all earlier items as input"),
    "enable_response_messages": NotBuilt("/v1/chat/completions/render tells a prompt's tokens"),
    "separate_reasoning": NotBuilt("reasoning has a field of its own", (True,), asking=False),
    "stream_reasoning": NotBuilt("see include_reasoning", (True,), asking=False),
    "images_config": NotBuilt(_MEDIA),
    "video_config": NotBuilt(_MEDIA),
    "min_dynamic_patch": NotBuilt(_MEDIA),
    "max_dynamic_patch": NotBuilt(_MEDIA),
    "beam_width": NotBuilt("/v1/completions has it as use_beam_search", (1,)),
}


def refuse_not_built(body: StrictBody, place: str = "", form_advice: str = "") -> None:
    """Raises `BadRequest` for the first undeclared field that asks for what is not built. `place`:
    what stands in front of its name. `form_advice`: of the body that `body` is a part of."""
    form_advice = form_advice or body.form_advice
    for name, value in (body.model_extra or {}).items():
        if (entry := NOT_BUILT.get(name)) and entry.is_asked_by(value):
            advice = (entry.advice in _OF_FORMS and form_advice) or entry.advice
            raise BadRequest(
                f"{place}{name} is not supported: {advice}",
                param=place + name,
                code="unsupported_parameter",
            )
