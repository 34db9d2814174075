"""Says how a conversation of /v1/responses is summed up, and how the summary comes back.

    input [..., compaction_trigger]    the model is asked for a summary
    output [compaction]                which is its answer; nothing is kept here
    /v1/responses/compact              does the same, and repeats what the user said in front of it
    input [..., compaction, ...]       and stands in a later prompt as text

Clients pass the item's `encrypted_content` on without looking at it. It is the text itself, behind
a mark by which it is known from what other servers have sealed.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

ITEM = "compaction"
TRIGGER = "compaction_trigger"
SEAL = "tandem-summary:"
REQUEST = (
    "Sum up the conversation so far for another model, which will go on with the task and sees "
    "nothing but your summary: the user's goal and wishes, what was done and decided and why, "
    "files, commands and results that matter, what failed, and what is to be done next. Be "
    "complete and brief. Call no tool, and write nothing besides the summary."
)
_HEAD = "This is a summary of the conversation before, which was too long to go on with:"


def is_summary_asked(items: str | list[Json]) -> bool:
    """Says whether the input ends with a trigger. Those before its end have been answered."""
    return not isinstance(items, str) and bool(items) and items[-1].get("type") == TRIGGER


def summary_of(item: Json) -> str | None:
    """Returns what the prompt says of a `compaction`; None for one of another server."""
    sealed = item.get("encrypted_content")
    if not isinstance(sealed, str) or not sealed.startswith(SEAL):
        return None
    return f"{_HEAD}\n\n{sealed.removeprefix(SEAL)}"


def user_messages(items: str | list[Json]) -> list[Json]:
    """Returns the messages of the user among the items, in the form of output."""
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    return [
        {"type": "message", "status": "completed", **item, "content": _parts(item["content"])}
        for item in items
        if item.get("type") in (None, "message") and item.get("role") == "user"
    ]


def _parts(content: Any) -> Any:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content
