"""Bounds what each tenant uses: requests and tokens a second.

1. taken      a request takes 1, and its prompt and longest answers, from its tenant's buckets
2. refused    one of them is empty: 429, with the time until it no longer is
3. given back its tokens, if nothing answers it: it is refused here or by a node, before it has any;
              all of it, if it was only checked and comes again

Each router replica grants its share and a fifth more, because requests never spread evenly: a
tenant can exceed its limits by at most that fifth.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from router.admission.retry_after import RetryAfter
from router.admission.token_bucket import TokenBucket
from router.errors import RateLimited
from router.request.info import RequestInfo
from router.request.tenants import Tenant

_BURST_S = 10.0
_DEFAULT_ANSWER = 400
"""Tokens, for a request that sets no limit."""
_SLACK = 1.2


@dataclass(slots=True)
class _Buckets:
    requests: TokenBucket | None
    tokens: TokenBucket | None


@dataclass(slots=True, kw_only=True)
class TenantLimits:
    retry_after: RetryAfter
    num_routers: int = 1
    _buckets: dict[Tenant, _Buckets] = field(default_factory=dict)

    def take(self, request: RequestInfo, now: float) -> None:
        """Takes what `request` costs. Raises `RateLimited`; then nothing is taken."""
        buckets = self._of(request.tenant)
        for bucket, unit in ((buckets.requests, "requests"), (buckets.tokens, "tokens")):
            if bucket is not None and (wait_s := bucket.wait_s(now)) > 0:
                raise RateLimited(
                    f"{request.tenant.name} has used up its {unit} for the moment. Slow down, or "
                    f"ask the operator for a higher limit.",
                    retry_after_s=self.retry_after.seconds(wait_s),
                )
        if buckets.requests is not None:
            buckets.requests.take(1)
        if buckets.tokens is not None:
            buckets.tokens.take(token_cost(request))

    def give_back(self, request: RequestInfo, num_requests: int = 0) -> None:
        """Gives back the tokens that `request` took, of which none were computed, and this many
        requests. Buckets of limits that hold no more are gone."""
        buckets = self._buckets.get(request.tenant)
        if buckets is not None and buckets.tokens is not None:
            buckets.tokens.take(-token_cost(request))
        if buckets is not None and buckets.requests is not None:
            buckets.requests.take(-num_requests)

    def _of(self, tenant: Tenant) -> _Buckets:
        """Returns the tenant's buckets. A tenant whose limits were changed is another tenant and
        begins with full buckets."""
        found = self._buckets.get(tenant)
        if found is None:
            for known in [known for known in self._buckets if known.name == tenant.name]:
                del self._buckets[known]
            found = _Buckets(self._bucket(tenant.requests_per_s), self._bucket(tenant.tokens_per_s))
            self._buckets[tenant] = found
        return found

    def _bucket(self, rate: float) -> TokenBucket | None:
        if rate <= 0:
            return None
        share = rate if self.num_routers == 1 else _SLACK * rate / self.num_routers
        return TokenBucket(share, max(1.0, share * _BURST_S))


def token_cost(request: RequestInfo) -> int:
    """Returns the tokens of the prompts and of the longest answers that it may get."""
    if not request.generates:
        return 0
    answer = request.max_tokens or _DEFAULT_ANSWER
    return request.num_prompt_tokens + request.num_answers * answer
