"""Bugs of what moves KV, places requests and carries answers."""

from __future__ import annotations

from tests.bugs.bug import HAND_OVER, ROWS_HAND_OVER, Bug

_PEERS_BY_GROUP = ("tests/engine/sched/arrivals/test_peers_by_group.py",)

CLUSTER_BUGS = (
    Bug(
        "part-of-a-window-found", "the first block of a window that a peer sent in part is found",
        "engine/sched/arrivals/peer_source.py",
        "is_by_token=not self._takes_blocks(params)", "is_by_token=False",
        _PEERS_BY_GROUP,
    ),
    Bug(
        "part-of-a-window-taken", "of a prefix's window the first block is not taken whole",
        "kv_transfer/transports/group_target.py",
        "if not meta.is_prefix or", "if True or",
        ("tests/engine/models/test_prefixes_of_peers.py", "-k", "whole"),
    ),
    Bug(
        "state-of-another-part", "a prompt goes on behind a part of a pull with another state",
        "engine/sched/arrivals/peer_source.py",
        "if kv_cache.can_continue(num_tokens, stop):", "if num_tokens > arrival.num_before:",
        _PEERS_BY_GROUP,
    ),
    Bug(
        "shared-blocks-pulled", "a pull writes into blocks that others have in their prefixes",
        "engine/sched/arrivals/peer_source.py",
        "finds_certainly, writes_by_token = False, True",
        "finds_certainly, writes_by_token = False, False",
        _PEERS_BY_GROUP,
    ),
    Bug(
        "state-left-behind", "of a pulled request the state stays on the prefill node",
        "kv_transfer/layout.py", "return range(min(1, len(tokens)))", "return range(0)",
        HAND_OVER,
    ),
    Bug(
        "one-page-a-slot", "layers that share a slot are sent, and kept, as if each had it alone",
        "kv_transfer/memory/cache_view.py",
        "slot * self.slot_bytes + block_id * self.page_bytes + inside",
        "slot * self.slot_bytes + block_id * self.page_bytes",
        ROWS_HAND_OVER,
    ),
    Bug(
        "open-row-left-behind", "tokens of a row that is not closed stay on the prefill node",
        "kv_transfer/layout.py",
        "return range(max(first_token, self.first_token_seen(num_tokens)), num_tokens)",
        "return range(0 if self.is_open else max(first_token, self.first_token_seen(num_tokens)),\n"
        "                     0 if self.is_open else num_tokens)",
        ROWS_HAND_OVER,
    ),
    Bug(
        "drafts-left-behind", "a drafter's window stays on the prefill node",
        "kv_transfer/layout.py", "        if self.has_same_drafts(peer):\n", "        if False:\n",
        ROWS_HAND_OVER,
    ),
    Bug(
        "no-checksum", "a corrupt chunk of KV is used",
        "kv_transfer/wire/chunk.py", "if self._crc != self._expected:", "if False:",
        ("tests/kv_transfer/test_wire.py",),
    ),
    Bug(
        "part-for-whole", "of a pull that failed, more is kept than has come in every layer",
        "kv_transfer/transports/chunk_assembler.py",
        "min(self._first_token_of(grid, i) for i in self._missing)",
        "max(self._first_token_of(grid, i) for i in self._missing)",
        ("tests/kv_transfer/test_parts_kept.py",),
    ),
    Bug(
        "read-too-late", "KV is used that was read after the peer had let go of it",
        "kv_transfer/transports/nixl/window_assembler.py",
        "read.error or read.word != message.lease[1]", "read.error",
        ("tests/kv_transfer/test_nixl_windows.py",),
    ),
    Bug(
        "refilled-too-soon", "a slot is filled again while copies into it are on their way",
        "kv_transfer/transports/nixl/filled_slots.py",
        "        lease = filled.lease\n        if lease is not None:\n            lease.release()\n"
        "            del self._unread[lease.slot, lease.number]\n"
        "            self.window.slots.give_back(filled.slot)",
        "        lease = filled.lease\n        if lease is not None:\n            lease.release()\n"
        "            del self._unread[lease.slot, lease.number]\n"
        "        self.window.slots.give_back(filled.slot)",
        ("tests/kv_transfer/test_nixl_faults.py",),
    ),
    Bug(
        "kept-too-long", "blocks of a part are not given back when others need them",
        "engine/sched/arrivals/arrival.py",
        "IDLE_WITH_BLOCKS = (_S.HERE, _S.PART, _S.READY)",
        "IDLE_WITH_BLOCKS = (_S.HERE, _S.READY)",
        ("tests/engine/sched/arrivals/test_pulls_that_fail.py",), hangs=True,
    ),
    Bug(
        "no-fencing", "a message of an earlier attempt counts for the one that lives",
        "kv_transfer/state.py",
        "return live.transfer if live is not None and live.attempt == attempt else None",
        "return live.transfer if live is not None else None",
        ("tests/kv_transfer/test_state_table.py",),
    ),
    Bug(
        "no-epoch", "a node that restarted is taken for the one before",
        "router/nodes/registry.py", "known.epoch != report.epoch", "known.epoch is None",
        ("tests/router/test_registry.py",),
    ),
    Bug(
        "old-epoch", "a late report of the start before replaces the node",
        "router/nodes/registry.py", "if report.epoch in node.retired_epochs:", "if False:",
        ("tests/router/test_registry.py",),
    ),
    Bug(
        "first-block-key", "all who share a system prompt are one session",
        "router/request/info.py", "is_user = (message.is_of_user for", "is_user = (True for",
        ("tests/router/test_session.py",),
    ),
    Bug(
        "no-salt", "tenants share cached prompts and sessions",
        "router/request/info.py",
        'return b"%d:%b%b" % (len(tenant.salt), tenant.salt, data)', "return data",
        ("tests/router/test_session.py", "tests/router/test_keys.py"),
    ),
    Bug(
        "retry-storm", "retries are not paid for",
        "router/relay/attempts/attempts.py",
        "return placement if self._may_retry(request) else None", "return placement",
        ("tests/router/test_forward.py", "-k", "budget or retr"),
    ),
    Bug(
        "missed-tombstone", "the pods of a deleted slice stay",
        "router/kubernetes/endpoint_slices.py",
        "self._by_name.pop(one.metadata.name, None)", "pass",
        ("tests/router/test_kubernetes.py",),
    ),
    Bug(
        "unbounded-index", "the prefix index grows without end",
        "router/placement/prefixes/prefix_index.py",
        "min(most, self.num_entries - self.max_entries)", "0",
        ("tests/router/test_placement.py",),
    ),
    Bug(
        "no-deadline", "an answer that comes too late is computed all the same",
        "router/admission/admission_gate.py",
        "        late_s = waited_s + ahead_s - self.deadline_s(request)\n        if late_s > 0:",
        "        late_s = waited_s + ahead_s - self.deadline_s(request)\n        if False:",
        ("tests/router/test_admission.py",),
    ),
    Bug(
        "lost-slot", "a request that ends early keeps its place at the nodes",
        "router/admission/ticket.py", "            self._gate.free()\n", "            pass\n",
        ("tests/router/test_admission.py",),
    ),
    Bug(
        "repeated-token", "what the next node repeats reaches the client again",
        "router/relay/journal.py", "is_new = self._take_entry(line) and is_new",
        "self._take_entry(line)",
        ("tests/router/test_journal.py",),
    ),
    Bug(
        "lost-token", "a hole in the journal is not seen",
        "router/relay/journal.py", "if number > self.next_number:", "if False:",
        ("tests/router/test_journal.py",),
    ),
    Bug(
        "silent-truncation", "an answer that nobody can end just ends",
        "router/relay/journaled_relay.py", "self.journal.error or lost_event(path)", 'b""',
        ("tests/router/test_migration.py", "-k", "nobody or budget or error"),
    ),
    Bug(
        "frozen-for-ever", "a node that hangs is waited for",
        "router/relay/attempts/silence_watch.py",
        "return silent_s > self.stall_s or both_silent", "return False",
        ("tests/router/test_silence.py",),
    ),
    Bug(
        "left-behind", "a client that hangs up is answered to the end",
        "edge/http/connection/client_connection.py", "        self._task.cancel()\n", "",
        ("tests/router/test_streams.py", "-k", "leaves_mid_stream"),
        hangs=True,
    ),
    Bug(
        "open-door", "a key that nobody has lets in",
        "router/edge/api_keys.py",
        "return found[0] if found else None",
        "return found[0] if found else ANYONE",
        ("tests/router/test_keys.py",),
    ),
    Bug(
        "half-an-output", "a client may get a part of the events of one output, and later all",
        "router/relay/journal.py", "        if not self._num_missing:", "        if True:",
        ("tests/router/test_journal.py",),
    ),
    Bug(
        "two-bodies", "a whole answer that two nodes have sent is there twice",
        "router/relay/journaled_relay.py", "            self._body = events",
        "            self._body += events",
        ("tests/decode_node/test_cuts_behind_a_router.py",),
    ),
    Bug(
        "unread-replay", "the node that goes on with a call takes it for text",
        "decode_node/answer/chat_format.py",
        "    def resume(self, choice: Choice, output: RequestOutput) -> None:\n"
        "        self._readers.read(choice.index, output)\n",
        "    def resume(self, choice: Choice, output: RequestOutput) -> None:\n",
        ("tests/decode_node/test_chat_resume.py",),
    ),
    Bug(
        "renumbered", "numbers of events begin anew on the node that goes on",
        "decode_node/answer/format.py", "        self.num_events = resume.num_events\n", "",
        ("tests/decode_node/test_responses_api.py", "-k", "cut"),
    ),
    Bug(
        "claimed-n-times", "n choices claim the blocks of their prompt n times",
        "decode_node/disagg/credits.py",
        "num_shared = num_prompt_tokens // self.block_size", "num_shared = 0",
        ("tests/decode_node/test_credits.py", "-k", "choices"),
    ),
)  # fmt: skip
