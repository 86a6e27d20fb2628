"""The gateway's settings from the environment. Knows no server."""

from __future__ import annotations

from pydantic import Field

from shardline.contract.webhooks.webhook_settings import WebhookSettings


class GatewaySettings(WebhookSettings):
    """Settings of one gateway process."""

    http_host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all")
    http_port: int = Field(
        8000, ge=0, le=65535, description="the gateway's port; 0 takes a free one"
    )
    http_allowed_hosts: str = Field(
        "",
        description="hosts that requests may name, with commas, besides localhost, or * for any; "
        "others get 421; "
        "default: only localhost if `SHARDLINE_HTTP_HOST` is a loopback address, else any",
    )
    http_allowed_origins: str = Field(
        "",
        description="origins of web pages that may send requests (CORS), with commas: "
        "https://chat.example.org, or * for any",
    )
    http_key_fresh_s: float = Field(
        2.0,
        ge=0,
        le=60,
        description="how long an API key is cached: a revoke takes effect after it",
    )
    http_max_connections: int = Field(
        6144,
        ge=16,
        description="open connections; above it the one that has waited longest "
        "for a request is closed",
    )
    http_max_head_bytes: int = Field(
        64 << 10,
        ge=4096,
        le=1 << 20,
        description="size of one request's URL and headers (256 lines); larger ones get 431",
    )
    http_head_timeout_s: float = Field(
        10.0, gt=0, description="time for URL and headers to arrive; later ones get 408"
    )
    http_write_timeout_s: float = Field(
        30.0, gt=0, description="a connection whose caller reads nothing for this long is closed"
    )
    http_idle_timeout_s: float = Field(
        75.0,
        gt=0,
        description="how long an idle connection stays open; keep it longer than your proxy's",
    )
    http_max_in_flight: int = Field(
        1024,
        ge=1,
        description="requests answered at a time, seven eighths of them for one tenant; "
        "more get 429 and Retry-After",
    )
    http_max_followers: int = Field(
        4096, ge=1, description="event streams of jobs followed at a time; more get 429"
    )
    http_max_body_bytes: int = Field(
        8 << 20, ge=1024, description="size of one request's body; larger ones get 413"
    )
    http_max_buffered_bytes: int = Field(
        256 << 20,
        ge=1024,
        description="bodies read and not yet stored, decoded, together; more get 429; "
        "one body over a fourth gets 413",
    )
    http_max_unsent_bytes: int = Field(
        256 << 20,
        ge=1 << 20,
        description="answers over 64 KiB that are being sent, together; more get 429",
    )
    http_max_file_bytes: int = Field(
        200 << 20, ge=1024, description="size of one file of `/v1/files`; larger ones get 413"
    )
    http_max_stored_bytes: int = Field(
        10 << 30,
        ge=1024,
        description="files of one tenant, together; what would be over it gets 400",
    )
    http_keep_alive_s: float = Field(
        15.0, gt=0, description="interval between keep-alive comments on an idle event stream"
    )
    http_body_timeout_s: float = Field(
        30.0, gt=0, description="time for a request's body to arrive; later ones get 408"
    )
    http_end_wait_s: float = Field(
        30.0,
        gt=0,
        description="how long an event stream waits for an unreachable Postgres "
        "before it ends `interrupted`",
    )

    def allowed_origins(self) -> list[str]:
        """The origins in `http_allowed_origins`."""
        return [origin.strip() for origin in self.http_allowed_origins.split(",") if origin.strip()]
