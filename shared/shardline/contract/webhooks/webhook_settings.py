"""The setting that doors and relays share: where webhooks may go. Knows no server."""

from __future__ import annotations

from pydantic import Field, field_validator

from shardline.base.config import Settings
from shardline.contract.webhooks.targets import WebhookReach


class WebhookSettings(Settings):
    """What a process must know that takes webhooks or sends them."""

    webhook_networks: str = Field(
        "",
        description="non-public networks that webhooks may reach: "
        "`10.0.0.0/8,::1`; the same for gateways and relays",
    )

    @field_validator("webhook_networks")
    @classmethod
    def _networks_can_be_read(cls, text: str) -> str:
        """Raises Invalid."""
        WebhookReach.parse(text)
        return text

    @property
    def webhook_reach(self) -> WebhookReach:
        """Returns the addresses that webhooks may reach."""
        return WebhookReach.parse(self.webhook_networks)
