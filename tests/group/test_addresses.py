"""Addresses of a group over several machines, and the sockets between them."""

from __future__ import annotations

import errno
import socket

import pytest
from machine_kit import LOOPBACK, LOST_LIMIT_S, TWO, free_address, needs_ipv6

from comfy_wan_dist.ipc import tcp
from comfy_wan_dist.ipc.errors import (
    ConfigError,
)
from comfy_wan_dist.ipc.tcp import Address, parse_address
from comfy_wan_dist.mesh.machines import parse_machines


def test_address_is_host_and_port() -> None:
    assert parse_address(" node-1.lan:29400 ") == Address(host="node-1.lan", port=29400)
    assert str(parse_address("10.0.0.1:80")) == "10.0.0.1:80"
    assert parse_address("[0:0::1]:80") == Address(host="::1", port=80)
    assert str(parse_address("[::1]:80")) == "[::1]:80"
    for text in (
        "",
        "10.0.0.1",
        "::1:80",
        "[::1]",
        "[::g]:80",
        "[1:2]:80",
        "[10.0.0.1]:80",
        "10.0.0.1:",
        ":80",
        "a:0",
        "a:65536",
        "a b:80",
        "a:80:80",
        "a..b:80",
        "a" * 64 + ":80",
    ):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            parse_address(text)


@pytest.mark.parametrize(
    "host",
    [
        "0.0.0.0",
        "224.0.0.1",
        "[::]",
        "[ff02::1]",
        "[fe80::1]",
        "[fe80::1%eth0]",
        "[::ffff:0.0.0.0]",
    ],
)
def test_address_that_is_no_single_machines_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="not one at which other machines reach"):
        parse_address(f"{host}:80")


def test_address_of_ipv4_within_ipv6_is_the_ipv4_one() -> None:
    assert parse_address("[::ffff:10.0.0.1]:80") == Address(host="10.0.0.1", port=80)
    assert parse_address("169.254.3.4:80") == Address(host="169.254.3.4", port=80)


def test_address_is_read_for_several_machines_only() -> None:
    assert parse_machines(1, "nonsense") is None
    assert parse_machines(2, f"{LOOPBACK}:29400") == TWO
    for count in (0, 17):
        with pytest.raises(ConfigError, match="from 1 to 16"):
            parse_machines(count, str(TWO.head))
    with pytest.raises(ConfigError, match="head_address is empty"):
        parse_machines(2, " ")


def test_interface_is_the_one_with_the_address() -> None:
    assert tcp.interface_of("127.0.0.1") == tcp.interface_of(LOOPBACK) == "lo"
    with pytest.raises(ConfigError, match=r"no network interface .* 203\.0\.113\.7"):
        tcp.interface_of("203.0.113.7")


def test_head_of_several_addresses_listens_on_the_first_that_others_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def serve(place: tuple[str, int], **_: int) -> str:
        if place[0] == "203.0.113.7":
            raise OSError(errno.EADDRNOTAVAIL, "an old entry in the DNS")
        return place[0]

    places = {
        socket.AF_INET6: ["fe80::1%eth0", "fd00::1"],
        socket.AF_INET: ["127.0.1.1", "203.0.113.7", "10.9.9.9"],
    }
    found = [(family, 1, 6, "", (host, 80)) for family, hosts in places.items() for host in hosts]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "create_server", serve)
    head = Address(host="head.lan", port=80)
    assert tcp.listen(head) == "10.9.9.9"
    del found[-1]
    assert tcp.listen(head) == "fd00::1"
    del found[1]
    with pytest.raises(ConfigError, match="it is no address of this machine"):
        tcp.listen(head)
    del found[-1]
    with pytest.raises(ConfigError, match=r"means 127\.0\.1\.1 on this machine"):
        tcp.listen(head)


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_connections_between_machines_are_probed(host: str) -> None:
    address = free_address(host)
    assert tcp.interface_of(host) == "lo"
    with tcp.listen(address), tcp.connect(address, timeout_s=2) as connection:
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        unanswered_s = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000
        idle_s = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        probes = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
        between_s = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
    assert idle_s + probes * between_s < LOST_LIMIT_S
    assert idle_s + between_s + unanswered_s <= LOST_LIMIT_S
