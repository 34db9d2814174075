"""Schedules data-parallel groups: one scheduler for each, with rows, blocks and a connector of its
own, and this one above them.

    request ──▶ the group that it names, or the best by load and cached prefix (`group_choice`);
                its choices and beams share KV, so they stay together
    schedule    every group's scheduler decides; if any has a step, all ranks get one
    results     go to the scheduler that decided the step

Groups share nothing but the time of their steps. Sizes are padded here, once for all ranks: no rank
asks another what it is about to compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from engine.contracts.group_step import GroupOutput, GroupStep
from engine.contracts.messages import EngineCoreOutput, EngineCoreOutputs
from engine.contracts.outputs import SchedulerStats, TokenLogprobs
from engine.contracts.reports.crash_facts import EngineFacts
from engine.contracts.request import Request
from engine.contracts.scheduler_output import EncodingOutput
from engine.sched.admission import Admission
from engine.sched.departures.exports import is_exported
from engine.sched.groups.group_choice import choose_group
from engine.sched.groups.group_remote import GroupRemote
from engine.sched.groups.merged_stats import merged_stats
from engine.sched.groups.step_sizes import StepSizes
from engine.sched.remote_kv import RemoteKV
from engine.sched.rows.adapters import share_ledger
from engine.sched.rows.adaptive_drafts import DraftPlan, SharedDrafts
from engine.sched.rows.work_meter import WorkMeter
from engine.sched.scheduler import Scheduler
from kv_transfer.connectors.group_connector import GroupEvents
from kv_transfer.metadata import KVConnectorOutput, KVTransferParams


class _Admissions:
    """Stands for the `Admission` of each group."""

    def __init__(self, of_groups: Sequence[Admission]) -> None:
        self._of_groups = of_groups

    def take_stranded(self) -> list[str]:
        """Returns those of all groups; see `Admission`."""
        return [name for admission in self._of_groups for name in admission.take_stranded()]


class GroupScheduler:
    """Has the methods of a `Scheduler`, over those of all groups. `query_len`: tokens that a row
    which decodes computes in a step, with its drafts; `is_adaptive`: at most."""

    def __init__(
        self, groups: Sequence[Scheduler], query_len: int = 1, *, is_adaptive: bool = False
    ) -> None:
        self.groups = groups
        self._query_len = query_len
        self._drafts: SharedDrafts | None = None
        if is_adaptive:
            self._drafts = SharedDrafts(query_len)
            for group in groups:
                group.running.drafts = self._drafts
        self._num_given = [0] * len(groups)
        self.remote = GroupRemote([group.remote for group in groups], self._remote_of)
        share_ledger([group.adapters for group in groups], groups[0].adapters.ledger)
        self._sizes = [StepSizes() for _ in groups]
        self._step_id = 0
        self._group_of: dict[str, Scheduler] = {}
        """Maps each known request to the group that has it."""
        self._choices_of: dict[str, set[str]] = {}
        """Holds the choices of each prompt that go on."""
        self._prompt_of: dict[str, str] = {}

    # Requests ---------------------------------------------------------------------------------

    def add_request(self, request: Request) -> EngineCoreOutputs:
        """Adds a request to the group that it names, or to the best one, which the peer learns
        of a prompt. Raises ValueError like `Scheduler`."""
        names = request.request_id, *request.choice_ids
        for name in names:
            if name in self._group_of:
                raise ValueError(f"request {name!r} exists already")
        group = self._choose(request)
        chosen = self.groups[group]
        self._num_given[group] += 1
        self._group_of |= dict.fromkeys(names, chosen)
        if request.choice_ids:
            self._choices_of[request.request_id] = set(request.choice_ids)
            self._prompt_of |= dict.fromkeys(request.choice_ids, request.request_id)
        results = self._keep_outputs(chosen.add_request(request))
        if is_exported(request) and not results.outputs:
            results.outputs.append(EngineCoreOutput(request.request_id, [], group=group))
        return results

    def _choose(self, request: Request) -> int:
        if request.group >= 0:
            return request.group
        offers = [group.offer(request) for group in self.groups]
        given = zip(offers, self._num_given, strict=True)
        return choose_group([offer._replace(num_given=count) for offer, count in given])

    def abort_requests(self, request_ids: Iterable[str], error: str = "") -> EngineCoreOutputs:
        by_group: dict[int, list[str]] = {}
        for name in request_ids:
            group = self._group_of.get(name)
            for index, one in enumerate(self.groups):
                if group is None or group is one:  # An export may outlive its request.
                    by_group.setdefault(index, []).append(name)
        found = EngineCoreOutputs()
        for index, names in by_group.items():
            _add(found, self._keep_outputs(self.groups[index].abort_requests(names, error)))
        return found

    def supply_first_token(
        self, request_id: str, token_id: int, siblings: Sequence[int] = (), feature: bytes = b""
    ) -> EngineCoreOutputs:
        return self._ask(
            request_id,
            lambda group: group.supply_first_token(request_id, token_id, siblings, feature),
        )

    def supply_candidates(self, request_id: str, candidates: TokenLogprobs) -> EngineCoreOutputs:
        return self._ask(request_id, lambda group: group.supply_candidates(request_id, candidates))

    def prompt_computed(self, request_id: str) -> None:
        if (group := self._group_of.get(request_id)) is not None:
            group.prompt_computed(request_id)

    def retry_remote(self, request_id: str, params: KVTransferParams) -> EngineCoreOutputs:
        return self._ask(request_id, lambda group: group.retry_remote(request_id, params))

    def prefill_locally(self, request_id: str) -> EngineCoreOutputs:
        return self._ask(request_id, lambda group: group.prefill_locally(request_id))

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached KV. False: some group has requests or transfers that hold blocks, and
        keeps its own."""
        were_reset = [group.reset_prefix_cache() for group in self.groups]
        return all(were_reset)

    def has_unfinished_requests(self) -> bool:
        return any(group.has_unfinished_requests() for group in self.groups)

    # One step ---------------------------------------------------------------------------------

    def schedule(self) -> GroupStep | None:
        """Returns the next step of all groups; None when no group has one."""
        if self._drafts is not None:
            self._drafts.begin_step()
        steps = [group.schedule() for group in self.groups]
        if all(step is None for step in steps):
            return None
        sizes = [size.of(step) for size, step in zip(self._sizes, steps, strict=True)]
        only_decode = not any(size.num_prompt_tokens or size.waits_for_layers for size in sizes)
        most_decodes = max(size.num_decodes for size in sizes)
        drafts = DraftPlan(self._query_len)
        if self._drafts is not None:
            drafts = self._drafts.issued(most_decodes, only_decodes=only_decode)
        self._step_id += 1
        return GroupStep(
            self._step_id,
            cast(list[EncodingOutput | None], steps),
            max(size.num_decodes * drafts.query_len + size.num_prompt_tokens for size in sizes),
            most_decodes if only_decode else 0,
            max(size.num_sampled for size in sizes),
            *drafts,
        )

    def update_from_output(self, step: GroupStep, output: GroupOutput) -> EngineCoreOutputs:
        """Results come in the order of their steps. Raises ValueError like `Scheduler`."""
        found = EngineCoreOutputs(timestamp=time.monotonic())
        if self._drafts is not None:
            self._drafts.retired()
        for group, own, result in zip(self.groups, step.steps, output.outputs, strict=True):
            if own is not None:
                _add(found, self._keep_outputs(group.update_from_output(own, result)))
        return found

    def update_from_connector(self, output: KVConnectorOutput) -> EngineCoreOutputs:
        found = EngineCoreOutputs(timestamp=time.monotonic())
        assert isinstance(output, GroupEvents)
        for group, events in zip(self.groups, output.by_group, strict=True):
            if events is not None:
                _add(found, self._keep_outputs(group.update_from_connector(events)))
        return found

    # What there is ----------------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        return merged_stats([group.stats() for group in self.groups])

    def measure(self, meter: WorkMeter) -> None:
        """Counts what steps of the first group compute and move: that is one GPU's work."""
        self.groups[0].measure(meter)

    def facts(self) -> EngineFacts:
        found = EngineFacts()
        for index, group in enumerate(self.groups):
            of_group = group.facts()
            found.requests += of_group.requests
            found.num_requests += of_group.num_requests
            found.blocks |= {f"{name} of group {index}": n for name, n in of_group.blocks.items()}
            found.queues |= {f"{name} of group {index}": n for name, n in of_group.queues.items()}
            for name, count in of_group.transfers.items():
                found.transfers[name] = found.transfers.get(name, 0) + count
        return found

    @property
    def admission(self) -> _Admissions:
        """Returns what tells of requests that no group can compute."""
        return _Admissions([group.admission for group in self.groups])

    def check_empty(self) -> list[str]:
        left = [
            f"{what} of group {index}"
            for index, group in enumerate(self.groups)
            for what in group.check_empty()
        ]
        known = {*self._group_of, *self._choices_of, *self._prompt_of}
        return left + [f"the group of {name}" for name in sorted(known)]

    def _remote_of(self, request_id: str) -> RemoteKV | None:
        group = self._group_of.get(request_id)
        return None if group is None else group.remote

    def _ask(
        self, request_id: str, do: Callable[[Scheduler], EngineCoreOutputs]
    ) -> EngineCoreOutputs:
        group = self._group_of.get(request_id)
        return EngineCoreOutputs() if group is None else self._keep_outputs(do(group))

    def _keep_outputs(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        """Forgets requests that have ended."""
        for output in outputs.outputs:
            self._note_end(output)
        return outputs

    def _note_end(self, output: EngineCoreOutput) -> None:
        if not output.finish_reason:
            return
        name = output.request_id
        self._group_of.pop(name, None)
        prompt = self._prompt_of.pop(name, None)
        if prompt is not None:
            choices = self._choices_of[prompt]
            choices.discard(name)
            if not choices:
                del self._choices_of[prompt]
                self._group_of.pop(prompt, None)


def _add(to: EngineCoreOutputs, more: EngineCoreOutputs) -> None:
    to.outputs.extend(more.outputs)
    to.kv_results.extend(more.kv_results)
