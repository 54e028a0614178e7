"""TCP between the machines of a group: addresses, sockets that notice a lost peer, and the network interface.

The heartbeats are the kernel's keepalive probes, which also run while a process is busy or holds the GIL: a peer that
is gone without a word becomes an error on the socket within 25 s. Not covered: encryption. Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import socket
from dataclasses import dataclass

from .errors import ConfigError

KEEPALIVE_IDLE_S = 5
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_PROBES = 3
UNANSWERED_MS = 20_000

BACKLOG = 64
_LABEL = "[A-Za-z0-9_-]{1,63}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where a machine is reached: a host name or IP address, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """`HOST:PORT`, where HOST may be `[IPV6]`. Raises ConfigError, also for what is no single machine's address."""
    match = re.fullmatch(rf"({_LABEL}(?:\.{_LABEL})*|\[.*\]):([0-9]{{1,5}})", text.strip())
    with contextlib.suppress(ValueError):
        if match is not None and 1 <= int(match[2]) <= 65535:
            host = match[1]
            if host.startswith("["):
                ip = ipaddress.IPv6Address(host[1:-1])
                host = str(ip.ipv4_mapped or ip)
            if not _is_reachable(host):
                raise ConfigError(
                    f"address {text!r} is not one at which other machines reach this group's head; write the head's "
                    "own, which is neither for all interfaces, nor multicast, nor link-local"
                )
            return Address(host=host, port=int(match[2]))
    raise ConfigError(
        f"address {text!r} is not HOST:PORT; write a host name or IP address and a port from 1 to 65535, "
        "such as 192.168.1.10:29400 or [fd00::10]:29400"
    )


def _is_reachable(host: str) -> bool:
    """Whether it can be one machine's address beyond its own link; a name can."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return True
    # Link-local IPv6 is another machine's on each interface; link-local IPv4, as of a cable without a router, is not.
    is_local = ip.version == 6 and ip.is_link_local
    return not (ip.is_unspecified or ip.is_multicast or is_local)


def listen(address: Address) -> socket.socket:
    """A socket that listens on this one address of this machine; port 0 takes a free one. Raises ConfigError.

    Of a name's several addresses it takes the first that others reach and it can, IPv4 before IPv6; who connects tries
    them all.
    """
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ConfigError(
            f"the host of {address} cannot be found ({error.strerror}); write this machine's IP address"
        ) from error
    failure: OSError | None = None
    places = sorted((family, str(place[0])) for family, *_, place in found)
    for family, ip in places:
        # A name may also mean a loopback address, as in /etc/hosts of some systems, or a link-local one.
        is_loopback = ipaddress.ip_address(ip).is_loopback
        if ip == address.host or (not is_loopback and _is_reachable(ip)):
            try:
                return socket.create_server((ip, address.port), family=family, backlog=BACKLOG)
            except OSError as error:
                failure = error
    if failure is None:
        raise ConfigError(
            f"the host of {address} means {places[0][1]} on this machine, which no other machine reaches; "
            "write the IP address at which the others reach it"
        )
    remedies = {
        errno.EADDRINUSE: "choose another port, or end what listens there",
        errno.EADDRNOTAVAIL: "it is no address of this machine: write one at which the others reach it",
        errno.EACCES: "choose a port from 1024 on",
    }
    remedy = remedies.get(failure.errno or 0, "choose another address")
    raise ConfigError(
        f"this machine cannot listen on {address} ({os.strerror(failure.errno or 0)}); {remedy}"
    ) from failure


def connect(address: Address, *, timeout_s: float) -> socket.socket:
    """A watched connection. Raises OSError."""
    connection = socket.create_connection((address.host, address.port), timeout=timeout_s)
    watch(connection)
    return connection


def watch(connection: socket.socket) -> None:
    """Have the kernel find out when the peer is gone, whether or not anything is being sent."""
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_MS),
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    ):
        connection.setsockopt(level, option, value)


def interface_of(ip: str) -> str:
    """The network interface that has this address, or that stands for all of 127.0.0.0/8. Raises ConfigError."""
    import psutil

    wanted = ipaddress.ip_address(ip)
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            own = ipaddress.ip_address(entry.address.partition("%")[0])
            if own == wanted or (own.is_loopback and wanted.is_loopback):
                return str(name)
    raise ConfigError(
        f"no network interface of this machine has the address {ip}; write one of its own"
    )
