"""A network between the stages of one machine, every link of which passes a proxy. Knows ports and
pids, no protocol.

Stages listen on 127.0.0.1 and advertise 127.0.0.2, where a proxy for each port of their range
passes everything on. So links of epochs to come are proxied too, and the port tells which stage is
called: it is the one that listens there.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping

import psutil

from tests.chaos.network.proxy import Proxy

LISTEN = "127.0.0.1"
ADVERTISE = "127.0.0.2"
NUM_PORTS = 32
LOWEST_PORT = 10_000
HIGHEST_PORT = 30_000
"""Below the ports that the kernel gives to callers."""
TRIES = 50


class HopNet:
    """The proxies of one stack, whose links are encrypted unless they are `open`."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.is_open = is_open
        """Frames can be read, as faults must that change one."""
        self.ports = _free_ports()
        self.proxies: Mapping[int, Proxy] = {
            port: Proxy((LISTEN, port), host=ADVERTISE, port=port) for port in self.ports
        }

    def start(self) -> None:
        """Passes everything on."""
        for proxy in self.proxies.values():
            proxy.start()

    def stop(self) -> None:
        """Ends every link."""
        for proxy in self.proxies.values():
            proxy.stop()

    @property
    def settings(self) -> Mapping[str, str]:
        """What makes stages use it."""
        return {
            "SHARDLINE_HOP_TRANSPORT": "tcp",
            "SHARDLINE_HOP_INSECURE": "true" if self.is_open else "false",
            "SHARDLINE_HOP_BIND": LISTEN,
            "SHARDLINE_HOP_HOST": ADVERTISE,
            "SHARDLINE_HOP_PORTS": f"{self.ports[0]}-{self.ports[-1]}",
        }

    def to(self, pid: int) -> list[Proxy]:
        """The proxies through which this process is called at present; none when it is gone."""
        return [self.proxies[port] for port in _listening(pid) & self.proxies.keys()]

    def links(self) -> list[Proxy]:
        """The proxies that somebody calls through at present."""
        return [proxy for proxy in self.proxies.values() if proxy.num_links]

    def clear(self) -> None:
        """Fair weather everywhere."""
        for proxy in self.proxies.values():
            proxy.clear()


def _listening(pid: int) -> set[int]:
    try:
        connections = psutil.Process(pid).net_connections("tcp4")
    except psutil.NoSuchProcess:
        return set()
    return {
        one.laddr.port
        for one in connections
        if one.status == psutil.CONN_LISTEN and one.laddr.ip == LISTEN
    }


def _free_ports() -> range:
    """In a row, on both addresses."""
    for _ in range(TRIES):
        first = random.randrange(LOWEST_PORT, HIGHEST_PORT - NUM_PORTS)
        ports = range(first, first + NUM_PORTS)
        if all(_is_free(host, port) for host in (LISTEN, ADVERTISE) for port in ports):
            return ports
    raise OSError(
        f"no {NUM_PORTS} ports in a row are free between {LOWEST_PORT} and {HIGHEST_PORT}"
    )


def _is_free(host: str, port: int) -> bool:
    try:
        socket.create_server((host, port)).close()
    except OSError:
        return False
    return True
