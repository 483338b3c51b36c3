"""Prometheus metrics of a server."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_OVERHEAD = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0)
_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class ServingMetrics:
    """The metrics of one server, in a separate registry."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"rlake_serve_{name}", help_text, labels, registry=registry)

        def gauge(name: str, help_text: str, *labels: str) -> Gauge:
            return Gauge(f"rlake_serve_{name}", help_text, labels, registry=registry)

        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
            full = f"rlake_serve_{name}"
            return Histogram(full, help_text, buckets=buckets, registry=registry)

        self.responses = counter("responses", "Answers, by path and status.", "path", "status")
        self.refused = counter("refused", "Requests refused before they were read.", "status")
        self.finished = counter("completions", "Answers, by finish reason.", "model", "reason")
        self.tokens = counter("tokens", "Tokens read and sampled.", "model", "kind")
        self.broken = counter("broken_streams", "Streams that ended with an error.", "status")
        self.left = counter("disconnects", "Requests whose client went away.")
        self.turns = counter("recorded_turns", "Turns kept for the store.")
        self.rows = counter("stored_rows", "Rows stored.")
        self.store_failures = counter("store_failures", "Failed writes to the store.")
        self.swaps = counter("swaps", "Weight updates of engines.")
        self.swap_failures = counter("swap_failures", "Failed weight updates.")
        self.running = gauge("requests_running", "Running requests.")
        self.waiting = gauge("requests_waiting", "Queued requests.")
        self.sessions = gauge("sessions", "Open sessions.")
        self.session_bytes = gauge("session_bytes", "Approximate bytes of open sessions.")
        self.unstored_bytes = gauge("unstored_bytes", "Bytes of sessions that wait for the store.")
        self.version = gauge("policy_version", "The policy version that answers.", "model")
        self.overhead = histogram(
            "overhead_seconds", "Request time without the engine and the client.", _OVERHEAD
        )
        self.seconds = histogram("request_seconds", "Total request time.", _SECONDS)
        self.first_token = histogram(
            "first_token_seconds", "Time to the first token of streamed requests.", _SECONDS
        )

    def text(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry)
