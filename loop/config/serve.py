"""The section `serve`: address, engines, models and limits of the server."""

from typing import ClassVar

from pydantic import Field

from .base import Float, Int, Section
from .engines import EngineConfig, OtherModel, SamplingConfig


class LimitsConfig(Section):
    """Limits of a server: requests beyond them wait or are refused, before memory is full."""

    max_body_bytes: Int = Field(default=4 << 20, ge=1 << 10)
    """Largest request body, in bytes; larger ones are refused (413) before they are read."""
    max_image_bytes: Int = Field(default=20 << 20, ge=1)
    """Largest image of a request, in bytes (400); `max_body_bytes` is to hold it as base64."""
    max_image_pixels: Int = Field(default=64 << 20, ge=1, le=178_956_970)
    """Most pixels of an image of a request; one with more is not decoded (400)."""
    max_total_body_bytes: Int = Field(default=256 << 20, ge=1 << 10)
    """Bytes of all request bodies in memory; beyond it requests are refused (503)."""
    max_concurrent_requests: Int = Field(default=256, ge=1)
    """Requests that the engines process at once."""
    max_queued_requests: Int = Field(default=256, ge=0)
    """Requests that wait for an engine; more are refused (429)."""
    wait_seconds: Float = Field(default=60.0, gt=0)
    """Longest time that a request waits for an engine before it is refused (503), in seconds."""
    connections: Int = Field(default=4096, ge=1)
    """Open connections; one more closes the oldest idle one."""
    header_seconds: Float = Field(default=10.0, gt=0)
    """Longest time in which a request's headers must arrive, in seconds."""
    body_seconds: Float = Field(default=30.0, gt=0)
    """Longest time in which a request's body must arrive, in seconds (408)."""
    session_bytes: Int = Field(default=16 << 20, ge=1 << 10)
    """Largest session, in bytes; a larger one is stored and starts over."""
    all_sessions_bytes: Int = Field(default=256 << 20, ge=1 << 10)
    """Bytes of all open sessions; beyond it the least recently used ones are stored."""
    retry_bytes: Int = Field(default=64 << 20, ge=1 << 10)
    """Bytes of responses that are kept to answer repeated requests."""
    unstored_bytes: Int = Field(default=256 << 20, ge=1 << 10)
    """Bytes of ended sessions that are not stored yet; beyond it requests are refused (503)."""
    shutdown_seconds: Float = Field(default=30.0, gt=0)
    """Longest time that requests in progress have to finish at shutdown, in seconds."""


class ServeConfig(Section):
    """`rlake serve`: an OpenAI-compatible server that records its conversations."""

    noun: ClassVar[str] = "serve"

    host: str = "127.0.0.1"
    """Address to listen on; any address other than loopback requires a token."""
    port: Int = Field(default=8010, ge=0, le=65535)
    """Port to listen on; 0: a free one."""
    token_env: str = "RLAKE_SERVE_TOKEN"
    """Environment variable that holds the token which clients must send."""
    feedback_token_env: str | None = None
    """Environment variable that holds the token which feedback requires; None: clients that may
    send requests may also send feedback."""
    model: str | None = None
    """Name of the policy for clients; None: the run's name."""
    engine: EngineConfig | None = None
    """The inference engine; None: the explorer's."""
    engines: Int = Field(default=1, ge=1)
    """Number of engines; each request goes to the one with the fewest requests."""
    follow: bool = True
    """Whether new weights of the run are loaded as they are published."""
    poll_interval: Float = Field(default=1.0, gt=0)
    """Seconds between two checks for new weights."""
    models: dict[str, OtherModel] = Field(default={})
    """Other models that are served, by name."""
    sampling: SamplingConfig | None = None
    """Sampling parameters that a request leaves out; None: the explorer's."""
    session_idle_timeout: Float = Field(default=300.0, gt=0)
    """A session without requests for this many seconds ends."""
    session_max_age: Float = Field(default=3600.0, gt=0)
    """A session that is older than this many seconds is stored and starts over."""
    commit_interval: Float = Field(default=1.0, gt=0)
    """Seconds between two commits of ended sessions."""
    limits: LimitsConfig = LimitsConfig()
    """Bounds on memory, connections and waiting times."""
