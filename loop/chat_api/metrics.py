"""What a server tells Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_OVERHEAD = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0)
_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class ServingMetrics:
    """The numbers of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, told: str, *labels: str) -> Counter:
            return Counter(f"rlake_serve_{name}", told, labels, registry=registry)

        def gauge(name: str, told: str, *labels: str) -> Gauge:
            return Gauge(f"rlake_serve_{name}", told, labels, registry=registry)

        self.responses = counter("responses", "Answers, by path and status.", "path", "status")
        self.refused = counter("refused", "Requests refused before they were read.", "status")
        self.finished = counter("completions", "Answers, by finish reason.", "model", "reason")
        self.tokens = counter("tokens", "Tokens read and sampled.", "model", "kind")
        self.broken = counter("broken_streams", "Streams that ended with an error.", "status")
        self.left = counter("disconnects", "Requests whose client went away.")
        self.turns = counter("recorded_turns", "Turns kept for the store.")
        self.rows = counter("stored_rows", "Rows stored.")
        self.store_failures = counter("store_failures", "Times that the store refused rows.")
        self.swaps = counter("swaps", "Times that an engine took in new weights.")
        self.swap_failures = counter("swap_failures", "Times that it could not.")
        self.running = gauge("requests_running", "Requests that have a place.")
        self.waiting = gauge("max_queued_requests", "Requests that wait for a place.")
        self.sessions = gauge("sessions", "Sessions that go on.")
        self.session_bytes = gauge("session_bytes", "What they hold.")
        self.unstored_bytes = gauge("unstored_bytes", "Ended sessions that are not stored yet.")
        self.version = gauge("policy_version", "The version that answers.", "model")
        self.overhead = Histogram(
            "rlake_serve_overhead_seconds",
            "A request's time without the engine's, and without its reader's.",
            buckets=_OVERHEAD,
            registry=registry,
        )
        self.seconds = Histogram(
            "rlake_serve_request_seconds",
            "A request's whole time.",
            buckets=_SECONDS,
            registry=registry,
        )

        self.first_token = Histogram(
            "rlake_serve_first_token_seconds",
            "A streamed request's time until its first token.",
            buckets=_SECONDS,
            registry=registry,
        )

    def text(self) -> bytes:
        """Return all numbers as Prometheus reads them."""
        return generate_latest(self.registry)
