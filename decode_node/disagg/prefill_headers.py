"""Headers of an answer that tell the router how its prompt was prefilled.

    x-tandem-prefill-node: 10.0.0.7:5001                                  (`local`: this node)
    x-tandem-prefill-work: prompt=1234;cached=1024;queue=0.012;compute=0.031
    x-tandem-prefill-failed: 10.0.0.5:5001=resource_exhausted,10.0.0.6:5001=unreachable

From the work the router learns how fast prefill nodes are, from the failures which to leave out.
"""

from __future__ import annotations

from decode_node.observe.timeline import RequestRecord
from edge.http import headers as names


def prefill_headers(record: RequestRecord) -> dict[str, str]:
    """Returns the headers for a request whose first token is known."""
    prefill = record.prefill
    headers = {names.PREFILL_NODE: prefill.prefill_node or "local"}
    if prefill.prefill_node is not None and prefill.remote_queue_s is not None:
        headers[names.PREFILL_WORK] = (
            f"prompt={record.num_prompt_tokens};cached={prefill.cached_tokens};"
            f"queue={prefill.remote_queue_s:.6f};compute={prefill.remote_prefill_s:.6f}"
        )
    if prefill.failed_nodes:
        failed = (f"{address}={code}" for address, code in prefill.failed_nodes)
        headers[names.PREFILL_FAILED] = ",".join(failed)
    return headers
