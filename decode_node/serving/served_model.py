"""Knows the model that a node serves: its names, its text, and what may be asked of it.

`ServedModel.of_request` resolves the names in a request, once, into a `RequestModel`: all that
reads the request, prepares it and forms its answer has the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from decode_node.errors import Unavailable
from decode_node.serving.ask_limits import AskLimits
from decode_node.serving.chat_reading import ChatReading
from decode_node.serving.prompts.image_prompts import ImagePrompts
from decode_node.serving.prompts.prompts import Prompts
from edge.http.errors import NotFound
from edge.printable import listed
from engine.config import ModelConfig
from engine.contracts.request_spec import AdapterRef
from engine.frontend.tokenizer import Tokenizer
from engine.models.config.sampling_defaults import SamplingDefaults


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Holds what a node knows of its model.

    Attributes:
        adapters: By name, as they are now.
        prompts: Renders and tokenises, with the model's chat template.
        reading: How answers to chats are read.
        defaults: The sampling of requests that do not say.
        fingerprint: Equal for nodes whose answers to the same seed are: the release, and a digest
            of the weights and their type.
    """

    config: ModelConfig
    adapters: Mapping[str, AdapterRef]
    tokenizer: Tokenizer
    prompts: Prompts
    images: ImagePrompts
    reading: ChatReading
    limits: AskLimits
    defaults: SamplingDefaults
    fingerprint: str

    def check(self, name: str | None, meant: str = "") -> AdapterRef | None:
        """Returns the adapter of that name; None: the model itself, which a request without a name
        means, too. `meant`: the digest that a router means by the name, if it says so.

        Raises:
            NotFound: There is nothing of this name.
            Unavailable: The name stands for another adapter elsewhere.
        """
        adapter = None if name is None else self.adapters.get(name)
        if meant and (adapter is None or adapter.digest != meant):
            raise Unavailable(
                "the adapter of this name was replaced here; send the request to another node",
                code="adapter_changed",
            )
        if adapter is not None or name is None or name in self.config.served_names:
            return adapter
        served = listed([repr(one) for one in (*self.config.served_names, *self.adapters)])
        raise NotFound(
            f"the model {name!r} does not exist; this server has {served}",
            param="model",
            code="model_not_found",
        )

    def of_request(self, asked: str | None, routed: str = "", meant: str = "") -> RequestModel:
        """Resolves what a request names. Raises as `check` does.

        Args:
            asked: The name in the body; None: none.
            routed: What a router calls the model; "": no router says. The answer bears the
                client's own name then.
            meant: See `check`.
        """
        adapter = self.check(routed or asked, meant)
        own = self.config.served_model_name if adapter is None else adapter.name
        return RequestModel(self, adapter, (routed and asked) or own)


@dataclass(frozen=True, slots=True)
class RequestModel:
    """The model of one request: the served one or an adapter of it.

    Attributes:
        adapter: None: the model itself.
        name: Which the answer bears.
    """

    served: ServedModel
    adapter: AdapterRef | None
    name: str
