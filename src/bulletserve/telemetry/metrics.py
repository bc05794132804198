"""The server's metrics in Prometheus' text format: vLLM's names under our own prefix, so that dashboards port.

Knows nothing about HTTP or sockets. The numbers are plain attributes that one thread (the front's event loop) changes;
Prometheus objects are made when somebody asks, so that counting a token costs well under a microsecond.

Latency is what the front sees, its own queueing and the transport included: time to first token from the request's
arrival, inter-token latency between two tokens of one answer, end to end up to the last token.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from bulletserve.core.correction import NO_CORRECTION, NO_ERRORS
from bulletserve.core.engine_info import EngineInfo
from bulletserve.core.events import Status
from bulletserve.core.slo import Slo
from bulletserve.telemetry.histogram import Histogram
from bulletserve.telemetry.latency import within

PREFIX = "bullet:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISHED_REASONS = ("stop", "length", "abort", "error")

_TOKEN_GAPS_S = (
    0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15,
    0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_FIRST_TOKEN_S = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0,
)  # fmt: skip
_WHOLE_S = (0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0)
_TOKENS = tuple(float(2**n) for n in range(18))
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """When a request arrived, was admitted, had its first and its last token, in seconds of one clock."""

    arrival_s: float
    admitted_s: float
    first_token_s: float
    last_token_s: float


class Metrics(Collector):
    """All metrics of one server, in a registry of its own. `model_name` is the label on each."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self.status: Status | None = None
        """The engine's last word; None (all gauges 0) while there is no engine."""
        self.lane_share = 0.0
        """Share of the last status interval in which both lanes ran, 0 to 1."""
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished = dict.fromkeys(FINISHED_REASONS, 0)
        self.slo_outcomes: Counter[tuple[str, str]] = Counter()
        self.info: EngineInfo | None = None
        self.first_token_s = Histogram(_FIRST_TOKEN_S)
        self.token_gap_s = Histogram(_TOKEN_GAPS_S)
        self.whole_s = Histogram(_WHOLE_S)
        self.queue_s = Histogram(_WHOLE_S)
        self.prefill_s = Histogram(_WHOLE_S)
        self.decode_s = Histogram(_WHOLE_S)
        self.inference_s = Histogram(_WHOLE_S)
        self.turn_tokens = Histogram(_TOKENS)
        self.request_prompt_tokens = Histogram(_TOKENS)
        self.request_generation_tokens = Histogram(_TOKENS)
        self.request_max_tokens = Histogram(_TOKENS)
        self.request_n = Histogram(_CHOICES)
        self._registry.register(self)

    def update(self, status: Status | None) -> None:
        """Take in a status of the engine; None when it is gone."""
        before = self.status
        self.lane_share = 0.0
        if status is not None and before is not None and status.now_s > before.now_s:
            overlap = (status.both_lanes_s - before.both_lanes_s) / (status.now_s - before.now_s)
            self.lane_share = min(1.0, max(0.0, overlap))
        self.status = status

    def answered(self, slo: Slo, times: AnswerTimes, *, prompt_tokens: int, tokens: int, max_tokens: int) -> None:
        """Count an answer that ended well."""
        admitted_s = min(max(times.admitted_s, times.arrival_s), times.first_token_s)
        self.whole_s.observe(times.last_token_s - times.arrival_s)
        self.queue_s.observe(admitted_s - times.arrival_s)
        self.prefill_s.observe(times.first_token_s - admitted_s)
        self.decode_s.observe(times.last_token_s - times.first_token_s)
        self.inference_s.observe(times.last_token_s - admitted_s)
        self.request_prompt_tokens.observe(prompt_tokens)
        self.request_generation_tokens.observe(tokens)
        self.request_max_tokens.observe(max_tokens)
        ttft_s = times.first_token_s - times.arrival_s
        tpot_s = (times.last_token_s - times.first_token_s) / (tokens - 1) if tokens > 1 else None
        met = within(slo, prompt_tokens, ttft_s, tpot_s)
        self.slo_outcomes[slo.name, "met" if met else "missed"] += 1

    def text(self) -> bytes:
        """Everything, in Prometheus' text format (`CONTENT_TYPE`)."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily]:
        """Called by the registry."""
        yield from self._gauges()
        yield from self._forecasts()
        yield from self._counters()
        yield from self._histograms()
        if self.info is not None:
            yield self._cache_config(self.info)

    def _gauges(self) -> Iterator[GaugeMetricFamily]:
        status = self.status
        values = {
            "num_requests_running": ("Requests that the engine is running.", status and status.running),
            "num_requests_waiting": ("Requests that wait for the engine.", status and status.waiting),
            "kv_cache_usage_perc": (
                "Share of the KV cache's blocks in use, 0 to 1.",
                status and status.used_blocks / max(1, status.total_blocks),
            ),
            "prefill_sms": ("SMs (CPU threads) of the prefill lane.", status and status.prefill_sms),
            "decode_sms": ("SMs (CPU threads) of the decode lane.", status and status.decode_sms),
            "both_lanes_share": ("Share of the last second in which both lanes ran, 0 to 1.", self.lane_share),
            "longest_decode_gap_seconds": (
                "Longest pause between two decode steps, lately.",
                status and status.longest_gap_s,
            ),
            "standing_seconds": (
                "For how long the engine has started nothing though requests wait.",
                status and status.standing_s,
            ),
            "oldest_step_seconds": ("Age of the oldest unfinished step.", status and status.oldest_step_s),
        }
        for name, (text, value) in values.items():
            family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            family.add_metric([self._model_name], float(value or 0))
            yield family

    def _forecasts(self) -> Iterator[GaugeMetricFamily]:
        status = self.status
        correction = status.correction if status else NO_CORRECTION
        errors = status.forecast_errors if status else NO_ERRORS
        values = {
            "forecast_correction_ratio": (
                "What forecasts of steps are multiplied with, from observed ones.",
                correction,
            ),
            "forecast_error_ratio": ("Mean |observed / corrected forecast - 1| of late.", errors),
        }
        for name, (text, by_kind) in values.items():
            family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name", "phase"])
            for kind, value in by_kind._asdict().items():
                family.add_metric([self._model_name, kind], value)
            yield family

    def _counters(self) -> Iterator[CounterMetricFamily]:
        status = self.status
        values = {
            "prompt_tokens": ("Prompt tokens of requests that got a first token.", self.prompt_tokens),
            "generation_tokens": ("Tokens generated.", self.generation_tokens),
            "prefix_cache_queries": (
                "Prompt tokens looked up in the prefix cache.",
                status and status.prefix_queried_tokens,
            ),
            "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", status and status.prefix_hit_tokens),
            "switches": (
                "Steps on other SMs than the step before on their lane.",
                status and status.switches,
            ),
            "num_preemptions": (
                "Times that a running request was preempted: cache blocks had run out.",
                status and status.preemptions,
            ),
        }
        for name, (text, value) in values.items():
            family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            family.add_metric([self._model_name], float(value or 0))
            yield family
        family = CounterMetricFamily(
            PREFIX + "request_success", "Requests that ended.", labels=["model_name", "finished_reason"]
        )
        for reason, count in self.finished.items():
            family.add_metric([self._model_name, reason], float(count))
        yield family
        family = CounterMetricFamily(
            PREFIX + "request_slo", "Answers by class of targets and outcome.", labels=["model_name", "slo", "outcome"]
        )
        for (slo, outcome), count in sorted(self.slo_outcomes.items()):
            family.add_metric([self._model_name, slo, outcome], float(count))
        yield family
        family = CounterMetricFamily(
            PREFIX + "lane_busy_seconds", "Time in which a step ran on the lane.", labels=["model_name", "phase"]
        )
        family.add_metric([self._model_name, "prefill"], status.prefill_busy_s if status else 0.0)
        family.add_metric([self._model_name, "decode"], status.decode_busy_s if status else 0.0)
        yield family

    def _cache_config(self, info: EngineInfo) -> GaugeMetricFamily:
        labels = {
            "model_name": self._model_name,
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.total_blocks),
            "enable_prefix_caching": str(info.prefix_caching),
        }
        family = GaugeMetricFamily(PREFIX + "cache_config_info", "What the KV cache is like.", labels=list(labels))
        family.add_metric(list(labels.values()), 1.0)
        return family

    def _histograms(self) -> Iterator[HistogramMetricFamily]:
        values = {
            "time_to_first_token_seconds": ("From arrival to first token.", self.first_token_s),
            "inter_token_latency_seconds": ("Between two tokens of one answer.", self.token_gap_s),
            "e2e_request_latency_seconds": ("From arrival to the last token.", self.whole_s),
            "request_queue_time_seconds": ("From arrival to admission.", self.queue_s),
            "request_prefill_time_seconds": ("From admission to the first token.", self.prefill_s),
            "request_decode_time_seconds": ("From the first token to the last.", self.decode_s),
            "request_inference_time_seconds": ("From admission to the last token.", self.inference_s),
            "iteration_tokens_total": ("Tokens that the engine told at once.", self.turn_tokens),
            "request_params_n": ("Answers that a finished prompt was to have.", self.request_n),
            "request_params_max_tokens": (
                "Most tokens that a finished answer might have had.",
                self.request_max_tokens,
            ),
            "request_prompt_tokens": ("Prompt tokens of a finished request.", self.request_prompt_tokens),
            "request_generation_tokens": ("Tokens of a finished answer.", self.request_generation_tokens),
        }
        for name, (text, histogram) in values.items():
            family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
            family.add_metric([self._model_name], histogram.buckets(), sum_value=histogram.total)
            yield family
