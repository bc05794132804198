"""Requests as OpenTelemetry spans, sent by OTLP over HTTP: an option that needs the extra `[otel]`.

Knows nothing about HTTP beyond a request's facts. A span is made when the request has ended, with the times it had, so
that a token costs nothing; the library's own thread sends. A request that came with a `traceparent` is a part of that
trace. Attributes are named as OpenTelemetry's conventions for generative models name them.
"""

from typing import TYPE_CHECKING

from bulletserve.core.errors import ConfigError
from bulletserve.server.request_facts import RequestFacts
from bulletserve.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

_INSTALL = "pip install 'bulletserve[otel]'"


class Tracing:
    """A watcher that makes spans and hands them to `processor`; `close` sends what is left."""

    def __init__(self, processor: "SpanProcessor") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        self._provider = TracerProvider(resource=Resource.create({"service.name": "bulletserve"}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("bulletserve", __version__)

    @classmethod
    def to(cls, endpoint: str) -> "Tracing":
        """Spans go to the OTLP collector at `endpoint`, such as http://localhost:4318/v1/traces.

        Raises `ConfigError` if the packages are not installed or that is no HTTP address.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(f"--otlp-traces-endpoint needs OpenTelemetry ({error}): {_INSTALL}") from None
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"--otlp-traces-endpoint {endpoint}: spans are sent over HTTP, to an address such as "
                "http://localhost:4318/v1/traces"
            )
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))

    def __call__(self, facts: RequestFacts) -> None:
        """Make the span of a request that the engine saw."""
        if facts.engine_ids is None:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract({"traceparent": facts.traceparent})
        span = self._tracer.start_span(
            f"{facts.method} {facts.path}",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=facts.began_ns,
            attributes={
                "gen_ai.request.id": facts.request_id,
                "gen_ai.request.model": facts.model,
                "gen_ai.usage.input_tokens": facts.prompt_tokens,
                "gen_ai.usage.cached_tokens": facts.cached_tokens,
                "gen_ai.usage.output_tokens": facts.completion_tokens,
                "gen_ai.response.finish_reasons": facts.finish.split(","),
                "http.response.status_code": facts.status,
            },
        )
        if facts.first_token_s is not None:
            span.add_event("first token", timestamp=facts.began_ns + int(facts.first_token_s * 1e9))
        if "error" in facts.finish or facts.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(facts.began_ns + int(facts.seconds * 1e9))

    def close(self) -> None:
        """Send the spans that are left."""
        self._provider.shutdown()
