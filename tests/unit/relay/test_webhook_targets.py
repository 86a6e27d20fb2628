"""Where webhooks may go: what resolves to anything but a public address is refused, however it is
spelled, and a connection goes to the address that was judged."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from services.relay.notices import webhook_client
from services.relay.notices.webhook_client import NOT_PUBLIC, WebhookClient
from shardline.base.errors import Invalid
from shardline.contract.webhooks.targets import WebhookReach, check_url
from tests.unit.relay.webhook_samples import ANY_PORT, attempt_at

PUBLIC = WebhookReach()

PRIVATE_ADDRESSES = (
    *("127.0.0.1", "127.255.255.254", "0.0.0.0", "0.1.2.3"),  # noqa: S104 (nothing binds)
    *("10.0.0.1", "10.255.255.255"),
    *("172.16.0.1", "172.31.255.255", "192.168.0.1", "192.168.255.255"),
    # Shared by carriers; Alibaba's metadata.
    *("100.64.0.1", "100.127.255.255", "100.100.100.200"),
    # Link-local; metadata of AWS, Google, Azure and others; of AWS's containers; Oracle's; Azure's.
    *("169.254.0.1", "169.254.169.254", "169.254.170.2", "192.0.0.192", "168.63.129.16"),
    # Documentation, benchmarks, relays of 6to4, multicast, reserved, broadcast.
    *("192.0.2.1", "198.51.100.1", "203.0.113.1", "198.18.0.1", "198.19.255.255", "192.88.99.1"),
    *("192.0.0.8", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255"),
    *("::1", "::", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:7f00:1", "::ffff:10.0.0.1"),
    *("0:0:0:0:0:ffff:a9fe:a9fe", "::ffff:0:127.0.0.1", "::ffff:192.168.1.1"),
    # NAT64: of private addresses, and its local prefix.
    *("64:ff9b::127.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b::10.0.0.1", "64:ff9b:1::8.8.8.8"),
    # 6to4 and Teredo, whatever is inside.
    *("2002:7f00:1::", "2002:a9fe:a9fe::1", "2002:808:808::1", "2001:0:4136:e378::1"),
    *("fe80::1", "fe80::1%eth0", "fe80::1%1", "2606:4700::1111%eth0", "febf::1", "fec0::1"),
    *("fc00::1", "fd00::1", "fd00:ec2::254", "fdff:ffff::1"),
    *("ff02::1", "ff0e::1", "100::1", "2001:db8::1", "3fff::1", "2001:10::1", "2001:20::1"),
    *("5f00::1", "4000::1", "not an address", ""),
)
PUBLIC_ADDRESSES = (
    *("8.8.8.8", "1.1.1.1", "172.32.0.1", "192.169.0.1", "100.63.255.255", "100.128.0.1"),
    *("2606:4700:4700::1111", "2a00:1450:4001::1", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"),
)

PRIVATE_URLS = (
    *(
        "http://localhost/",
        "http://LOCALHOST:8080/a",
        "http://a.localhost/",
        "http://127.0.0.1:5432",
    ),
    # Decimal, octal, hexadecimal, and with fewer parts.
    *("http://2130706433/", "http://0x7f000001/", "http://017700000001/", "http://0177.0.0.1/"),
    *("http://0x7f.0.0.1/", "http://127.1/", "http://127.0.1/", "http://0x7f.1/", "http://0/"),
    *("http://2852039166/latest/meta-data/", "http://0xa9fea9fe/", "http://0251.0376.0251.0376/"),
    *("http://127.0.0.1./", "http://[::1]/", "http://[::ffff:127.0.0.1]/", "http://[::]:80/"),
    *("http://[fd00:ec2::254]/latest/", "http://[64:ff9b::7f00:1]/", "http://[2002:7f00:1::]/"),
)
NO_URLS = (
    *("ftp://example.org/", "file:///etc/passwd", "gopher://example.org/", "javascript:alert(1)"),
    *("redis://example.org:6379", "//example.org/", "example.org", "https:example.org", "http://"),
    *("http://user@example.org/", "http://user:secret@example.org/", "https://@example.org/"),
    *("http://[fe80::1%25eth0]/", "http://exa%6dple.org/", "http://example.org:0/"),
    *("http://example.org:65536/", "http://example.org:a/", "http://[::1", "http://example.org/#a"),
    *("http://example.org\\@127.0.0.1/", "http://example.org/ a", "http://example.org/\n", "\0"),
    *("http://ex\u00e4mple.org/", "http://\u2460\u2461\u2466.0.0.1/", "h" * 2_049, ""),
)


@pytest.mark.parametrize("address", PRIVATE_ADDRESSES)
def test_an_address_that_is_not_public_is_refused(address: str) -> None:
    assert not PUBLIC.allows(address)


@pytest.mark.parametrize("address", PUBLIC_ADDRESSES)
def test_a_public_address_is_allowed(address: str) -> None:
    assert PUBLIC.allows(address)


@pytest.mark.parametrize("url", [*PRIVATE_URLS, *NO_URLS])
def test_what_can_be_no_endpoint_is_refused_at_each_door(url: str) -> None:
    with pytest.raises(Invalid) as caught:
        check_url(url, PUBLIC)
    assert caught.value.field == "url"
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", [*PRIVATE_URLS, *NO_URLS])
async def test_nothing_is_connected_to_for_a_row_written_by_hand(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connect(*_: Any, **__: Any) -> Any:
        pytest.fail("a connection was tried")

    client = WebhookClient(PUBLIC, timeout_s=5, max_lookups=1)
    monkeypatch.setattr(client, "_ask", connect)
    answer = await client.send(attempt_at(url))
    assert answer.status_code is None
    assert answer.error
    await client.close()


def test_networks_that_an_operator_names_are_allowed_and_no_others() -> None:
    reach = WebhookReach.parse(" 10.1.0.0/16, ::1 ,169.254.169.254")
    assert [reach.allows(each) for each in ("10.1.2.3", "::1", "::ffff:10.1.2.3")] == [True] * 3
    assert [reach.allows(each) for each in ("10.2.0.1", "127.0.0.1", "::2")] == [False] * 3
    check_url("http://10.1.2.3:8080/hooks?a=b", reach)
    check_url("http://localhost/", WebhookReach.parse("127.0.0.0/8"))
    for wrong in ("10.0.0.1/8", "all", "10.0.0.0/33", ",".join(["10.0.0.0/8"] * 65)):
        with pytest.raises(Invalid, match="SHARDLINE_WEBHOOK_NETWORKS"):
            WebhookReach.parse(wrong)


@pytest.mark.parametrize(
    "url", ["https://example.org", "http://a-b.example.org:8080/x?y=%20#"[:-1]]
)
def test_a_url_of_a_name_is_taken(url: str) -> None:
    check_url(url, PUBLIC)


async def test_a_name_is_resolved_once_and_one_bad_address_of_it_refuses_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a server of names does that plays with us: public at the first question, private at the
    second, or both at once."""
    asked: list[str] = []
    answers = [["8.8.8.8", "127.0.0.1"]]

    def look_up(host: str) -> list[str]:
        asked.append(host)
        return answers[0]

    monkeypatch.setattr(webhook_client, "_look_up", look_up)
    client = WebhookClient(WebhookReach.parse("::1"), timeout_s=5, max_lookups=1)
    refused = await client.send(attempt_at("http://rebinding.example/"))
    assert (refused.error, asked) == (NOT_PUBLIC, ["rebinding.example"])

    with socket.socket() as listening:
        listening.bind(ANY_PORT)
        port = listening.getsockname()[1]
    answers[0] = ["::1", "::1"]
    closed = await client.send(attempt_at(f"http://rebinding.example:{port}/"))
    assert closed.error == "it takes no connection"
    assert asked == ["rebinding.example"] * 2, "once for each attempt"
    await client.close()
