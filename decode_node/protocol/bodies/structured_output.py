"""The fields by which a request says what its answer must look like.

OpenAI's is `response_format`; vLLM's `structured_outputs` and, before it, `guided_...`; SGLang's
`regex`, `ebnf` and `json_schema`. A request may use one of them. What they mean is made in
`decode_node.grammar`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from decode_node.protocol.bodies.body import Ignored, Int, Name, StrictBody

MAX_CHOICES = 4096
Choices = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]
JsonSchema = dict[str, Any] | bool
JsonText = str | dict[str, Any] | bool
"""An object or its JSON text: vLLM takes both."""


class JsonSchemaFormat(StrictBody):
    """The schema of a `response_format`, with a name for it."""

    name: Name | None = None
    """A name for the schema; nothing depends on it."""
    description: Ignored = None
    """The model does not see it."""
    schema_: JsonSchema | None = Field(default=None, alias="schema")
    """The schema of the answer (draft 2020-12); any object where there is none."""
    strict: bool | None = None
    """The answer follows the schema in any case; what a schema leaves optional may be left out."""


class LegacyTag(StrictBody):
    """A part of a text that has a schema."""

    begin: str
    """The text in front of it."""
    schema_: JsonSchema | None = Field(default=None, alias="schema")
    """The schema of it."""
    end: str
    """The text behind it."""


class AnswerFormat(StrictBody):
    """The form of the answer, by type."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    """The kind of form; `text` is any."""
    json_schema: JsonSchemaFormat | None = None
    """The schema, for the type `json_schema`."""
    schema_: JsonSchema | None = Field(default=None, alias="schema")
    """The schema in its place, as llama.cpp has it; for the type `json_object`, too."""
    value: JsonSchema | None = None
    """The same, as Hugging Face's `InferenceClient` writes the schema that it was given."""
    format: dict[str, Any] | None = None
    """The structure, for the type `structural_tag`."""
    structures: Annotated[list[LegacyTag], Field(fail_fast=True, max_length=256)] | None = None
    """Parts of a text, for the type `structural_tag`; an older way to write it."""
    triggers: Annotated[list[str], Field(fail_fast=True, max_length=256)] | None = None
    """Texts that begin such a part."""


class StructuredOutputs(StrictBody):
    """vLLM's way to say it: one of these, and how JSON is written."""

    json_: JsonText | None = Field(default=None, alias="json")
    """A JSON schema, as an object or as text."""
    regex: str | None = None
    """A regular expression that the whole answer matches."""
    choice: Choices | None = None
    """Texts, one of which is the answer."""
    grammar: str | None = None
    """A grammar: EBNF with the rule `root` (GBNF), or Lark with the rule `start`."""
    json_object: bool | None = None
    """The answer is a JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """Text with parts that follow schemas, in either of the shapes that `response_format` takes."""
    disable_any_whitespace: bool | None = None
    """Write JSON without white space between its parts."""
    disable_additional_properties: bool | None = None
    """Objects have no properties but those that the schema lists."""
    whitespace_pattern: str | None = None
    """A regular expression for what stands between parts of JSON, instead of up to 20 blanks."""
    disable_fallback: Ignored = None
    """There is one implementation."""
    backend: Ignored = None
    """There is one implementation."""


class StructuredFields(StrictBody):
    """The fields themselves, for the bodies of all APIs that have them."""

    response_format: AnswerFormat | None = None
    """The form of the answer: `text`, `json_object`, `json_schema` or `structural_tag`."""
    structured_outputs: StructuredOutputs | None = None
    """The form of the answer as vLLM writes it."""
    guided_json: JsonText | None = None
    """The same as `structured_outputs.json`."""
    guided_regex: str | None = None
    """The same as `structured_outputs.regex`."""
    guided_choice: Choices | None = None
    """The same as `structured_outputs.choice`."""
    guided_grammar: str | None = None
    """The same as `structured_outputs.grammar`."""
    guided_whitespace_pattern: str | None = None
    """The same as `structured_outputs.whitespace_pattern`."""
    guided_decoding_backend: Ignored = None
    """There is one implementation."""
    structural_tag: str | dict[str, Any] | None = None
    """The same as `structured_outputs.structural_tag`."""
    json_schema: JsonText | None = None
    """The same as `structured_outputs.json`; SGLang's name."""
    regex: str | None = None
    """The same as `structured_outputs.regex`; SGLang's name."""
    ebnf: str | None = None
    """The same as `structured_outputs.grammar`; SGLang's name."""
    thinking_token_budget: Int | None = None
    """The most tokens that the model may think before it answers; -1 for any number."""

    @property
    def form_field(self) -> str:
        """Returns the name of the field that says what form the answer has; empty where none is."""
        return next((name for name in _FORM_FIELDS if getattr(self, name) is not None), "")


_FORM_FIELDS = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "structural_tag", "json_schema", "regex", "ebnf",
)  # fmt: skip
