"""How a policy is served: where, which engines and models, and what bounds it."""

from typing import ClassVar

from pydantic import Field

from .base import Float, Int, Section
from .engines import EngineConfig, OtherModel, SamplingConfig


class LimitsConfig(Section):
    """What bounds a server: every one of these is refused, or waits, before memory is full."""

    max_body_bytes: Int = Field(default=4 << 20, ge=1 << 10)
    """Longest body of a request; longer ones are refused (413) before they are read."""
    max_total_body_bytes: Int = Field(default=256 << 20, ge=1 << 10)
    """Bodies that are in memory at once; more are refused (503)."""
    max_concurrent_requests: Int = Field(default=256, ge=1)
    """Requests that engines work on at once."""
    max_queued_requests: Int = Field(default=256, ge=0)
    """Requests that wait for that; more are refused (429)."""
    wait_seconds: Float = Field(default=60.0, gt=0)
    """How long one waits before it is refused (503)."""
    connections: Int = Field(default=4096, ge=1)
    """Open connections; one more closes the oldest that asks for nothing."""
    header_seconds: Float = Field(default=10.0, gt=0)
    """How long a connection may take until a request's headers are there."""
    body_seconds: Float = Field(default=30.0, gt=0)
    """How long a request's body may take (408)."""
    session_bytes: Int = Field(default=16 << 20, ge=1 << 10)
    """A session that holds more is stored, and begins anew."""
    all_sessions_bytes: Int = Field(default=256 << 20, ge=1 << 10)
    """Of all sessions that go on; above it the ones that rested longest are stored."""
    retry_bytes: Int = Field(default=64 << 20, ge=1 << 10)
    """Answers that are kept for requests which come again."""
    unstored_bytes: Int = Field(default=256 << 20, ge=1 << 10)
    """Of ended sessions whose rows are not stored yet; above it requests are refused (503)."""
    shutdown_seconds: Float = Field(default=30.0, gt=0)
    """How long requests under way may take to end when the server is stopped."""


class ServeConfig(Section):
    """`rlake serve`: an OpenAI-compatible server that records what it answers."""

    noun: ClassVar[str] = "serve"

    host: str = "127.0.0.1"
    """Where it listens; anywhere but on loopback it needs a token."""
    port: Int = Field(default=8010, ge=0, le=65535)
    """0: a free one."""
    token_env: str = "RLAKE_SERVE_TOKEN"
    """The environment variable that holds the token which clients must send."""
    feedback_token_env: str | None = None
    """The environment variable that holds the token of who may rate, and nobody else then; None:
    whoever may ask may rate."""
    model: str | None = None
    """What the policy is called; None: as the run."""
    engine: EngineConfig | None = None
    """What samples; None: as the explorer."""
    engines: Int = Field(default=1, ge=1)
    """How many of them; a request goes to the one with the fewest."""
    follow: bool = True
    """Whether the weights that the run publishes are taken in, as they come."""
    poll_interval: Float = Field(default=1.0, gt=0)
    """How often it looks for them."""
    models: dict[str, OtherModel] = Field(default={})
    """Other models that are served, by name."""
    sampling: SamplingConfig | None = None
    """What holds where a request says nothing; None: as the explorer."""
    session_idle_timeout: Float = Field(default=300.0, gt=0)
    """A session that nobody asks in for so long has ended."""
    session_max_age: Float = Field(default=3600.0, gt=0)
    """A session that goes on for longer is stored, and begins anew."""
    commit_interval: Float = Field(default=1.0, gt=0)
    """Ended sessions are stored together, this often."""
    limits: LimitsConfig = LimitsConfig()
