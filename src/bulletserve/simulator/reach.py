"""Which requests could meet their targets if they had the device to themselves: a bound on every policy at every rate.

Knows nothing about policies or queues. A first token cannot come before the whole prompt has run once, a next one not
before a step of that row alone, and nothing runs faster than on the best share that there is.
"""

from collections.abc import Sequence

from bulletserve.core.operators import StepShape
from bulletserve.core.slo import Slo
from bulletserve.core.snapshot import Limits
from bulletserve.simulator.truth import Truth
from bulletserve.workload.request_list import RequestLengths

SLACK = 0.7
"""A prompt in pieces may be a little faster than whole where tiles fall well: only what is far out of reach is said."""


def could_meet(truth: Truth, limits: Limits, requests: Sequence[RequestLengths], slo: Slo) -> list[bool]:
    """Of each request, in order. A request that is told to be out of reach certainly is."""
    prefill_shares, decode_shares = limits.lattice.prefill_shares, limits.lattice.decode_shares

    def reach(one: RequestLengths) -> bool:
        ttft_s, tpot_s = slo.ttft_target_s(one.prompt_tokens), slo.tpot_s
        if ttft_s is not None:
            prompt = StepShape.prefill([(one.prompt_tokens, 0)], limits.num_layers, 1)
            if min(truth.alone(prompt, sms).steady_s for sms in prefill_shares) * SLACK > ttft_s:
                return False
        if tpot_s is None or one.output_tokens < 2:
            return True
        row = StepShape.decode(1, one.prompt_tokens + 1, limits.num_layers)
        return min(truth.alone(row, sms).steady_s for sms in decode_shares) * SLACK <= tpot_s

    return [reach(one) for one in requests]
