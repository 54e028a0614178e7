"""The head's side of a group over several machines: who may join, and the connection to each machine.

    another machine                        the head, while a group starts
    worker --join   --- Arrive ----------> MachineDoor.accept -> MachineConnection
                    <-- Join ------------- its number, mesh, token, the port of torch's store
    its ranks       --- Hello -----------> MachineDoor.accept -> RankConnection

The machine's connection stays as long as the group: its end ends the group on either side. Nothing listens before a
group for several machines starts, nor after it is ready, but for torch's store.
Whoever reaches the port may join: it is for networks that are trusted.
"""

from __future__ import annotations

import contextlib
import logging
import select
from dataclasses import dataclass

from ...ipc.channel import ChannelClosed, SocketChannel
from ...ipc.errors import MachineLost, ProtocolError, VersionMismatch, WorkerDied, WorkerStartError
from ...ipc.machine_messages import Arrive, Join, Refuse
from ...ipc.messages import Hello
from ...ipc.tcp import Address, interface_of, listen, watch
from ..folder import same_secret
from ..listener import RankConnection
from ..spec import LaunchSpec

# Who is silent holds nobody up, but is the first to go when more come.
MAX_GUESTS = 256
SEND_TIMEOUT_S = 5.0
LAST_WORD_TIMEOUT_S = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineConnection:
    """A machine that has joined as number `number`. ip: where it connects from."""

    number: int
    host: str
    ip: str
    channel: SocketChannel

    def last_word(self) -> WorkerDied:
        """Why it left; for when its connection has something to say or has ended.

        MachineLost, unless it says itself that it cannot go on.
        """
        try:
            message = self.channel.receive(LAST_WORD_TIMEOUT_S).message
        except (ChannelClosed, ProtocolError, TimeoutError) as error:
            return lost_machine(self.host, error)
        if isinstance(message, Refuse):
            return WorkerDied(f"machine {self.host} gave up: {message.reason}")
        return MachineLost(
            f"machine {self.host} said {type(message).__name__} out of turn; install the same version on all machines"
        )


def lost_machine(host: str, cause: Exception) -> MachineLost:
    """The error for a machine whose connection has ended by `cause`."""
    return MachineLost(
        f"machine {host} is lost: {cause}; see to its worker and the network, then run the job again"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Guest:
    """Whoever has connected from `ip` and has not said who it is."""

    ip: str
    channel: SocketChannel


class MachineDoor:
    """The two TCP sockets of a group over several machines, both on the head's address only."""

    def __init__(self, spec: LaunchSpec, *, token: str) -> None:
        """Raises ConfigError if the address cannot be listened on."""
        assert spec.machines is not None, "one machine needs no door"
        self._spec = spec
        self._token = token
        self._count = spec.machines.count
        self.joined: dict[int, MachineConnection] = {}
        self._socket = listen(spec.machines.head)
        self._socket.setblocking(False)
        self._guests: dict[int, _Guest] = {}
        self._ready = select.epoll()
        self._ready.register(self._socket, select.EPOLLIN)
        try:
            # Held open until the launcher has it, so that nobody else takes the port.
            self.store = listen(Address(host=spec.machines.head.host, port=0))
            ip, port = self.store.getsockname()[:2]
            self.store_address = Address(host=ip, port=port)
        except BaseException:
            self._close_door()
            raise

    @property
    def interface(self) -> str:
        """The network interface towards the other machines."""
        return interface_of(self.store_address.host)

    @property
    def missing(self) -> int:
        """How many machines have not joined."""
        return self._count - 1 - len(self.joined)

    def fileno(self) -> int:
        """Readable when `accept` has something to do."""
        return self._ready.fileno()

    def accept(self) -> RankConnection | None:
        """Take one new connection, or hear one that has spoken: a machine joins, a rank comes in. Does not wait.

        None unless it is a rank. Raises WorkerStartError for a machine with another version of this project.
        """
        for descriptor, _ in self._ready.poll(0, 1):
            if descriptor == self._socket.fileno():
                descriptor = self._welcome()
            if descriptor in self._guests:
                return self._hear(descriptor)
        return None

    def close_store(self) -> None:
        """Let go of the store's socket, which the launcher has by now."""
        self.store.close()

    def close(self) -> None:
        """Let nobody in any more. Machines that have joined stay."""
        self._close_door()
        self.store.close()

    def _close_door(self) -> None:
        self._socket.close()
        self._ready.close()
        for guest in self._guests.values():
            guest.channel.drop()
        self._guests.clear()

    def _welcome(self) -> int:
        """Take a connection; its descriptor, or -1 if it is gone already."""
        try:
            connection, address = self._socket.accept()
        except OSError:
            return -1
        guest = _Guest(ip=str(address[0]), channel=SocketChannel(connection))
        descriptor = guest.channel.fileno()
        self._guests[descriptor] = guest
        self._ready.register(descriptor, select.EPOLLIN)
        with contextlib.suppress(OSError):  # if it is gone, that is heard soon
            watch(connection)
        if len(self._guests) > MAX_GUESTS:
            oldest = self._part_from(next(iter(self._guests)))
            logger.warning("a connection from %s to the worker group never said a word", oldest.ip)
            oldest.channel.close()
        return descriptor

    def _part_from(self, descriptor: int) -> _Guest:
        """It is no guest any more; its channel stays open."""
        self._ready.unregister(descriptor)
        return self._guests.pop(descriptor)

    def _hear(self, descriptor: int) -> RankConnection | None:
        guest = self._guests[descriptor]
        ip, channel = guest.ip, guest.channel
        try:
            message = channel.receive(0).message
        except TimeoutError:
            return None  # the rest is still to come
        except (ProtocolError, ChannelClosed) as error:
            self._part_from(descriptor)
            _turn_away(guest, error)
            return None
        self._part_from(descriptor)
        try:
            if isinstance(message, Hello):
                return self._admit_rank(message, ip, channel)
            if isinstance(message, Arrive):
                self._admit_machine(message, ip, channel)
                return None
            raise ProtocolError(f"it began with {type(message).__name__}")
        except (ProtocolError, ChannelClosed, TimeoutError) as error:
            _turn_away(guest, error)
            return None

    def _admit_machine(self, arrival: Arrive, ip: str, channel: SocketChannel) -> None:
        if channel.ends_within(0):
            raise ProtocolError("the machine has gone again")
        if not self.missing:
            _refuse(channel, f"the group has its {self._count} machines already")
            return
        number = len(self.joined) + 1
        spec = self._spec
        join = Join(
            machine=number,
            machines=self._count,
            ranks=spec.ranks_per_machine,
            device=spec.devices.kind,
            mesh=str(spec.degrees),
            runner=spec.runner,
            store_port=self.store_address.port,
            token=self._token,
        )
        channel.send(join, timeout_s=SEND_TIMEOUT_S)
        host = f"{arrival.name} ({ip})"
        self.joined[number] = MachineConnection(number=number, host=host, ip=ip, channel=channel)
        logger.info("machine %s has joined the worker group as number %d", host, number)

    def _admit_rank(self, hello: Hello, ip: str, channel: SocketChannel) -> RankConnection:
        if not same_secret(hello.token, self._token):
            raise ProtocolError(f"process {hello.pid} there does not know the token")
        machine = self.joined.get(hello.rank // self._spec.ranks_per_machine)
        if machine is None or machine.ip != ip:
            raise ProtocolError(f"process {hello.pid} there calls itself rank {hello.rank}")
        return RankConnection(
            rank=hello.rank,
            pid=hello.pid,
            channel=channel,
            process=None,
            machine=machine.number,
            host=machine.host,
        )


def _turn_away(guest: _Guest, error: Exception) -> None:
    """Close its connection. Raises WorkerStartError, having told it why, if it is of another version."""
    if isinstance(error, VersionMismatch):
        _refuse(guest.channel, str(error))
        raise WorkerStartError(
            f"machine {guest.ip} wants to join with another version of Wan Dist ({error}); "
            "install the same one on all machines"
        ) from error
    logger.warning("refused a connection from %s to the worker group: %s", guest.ip, error)
    guest.channel.close()


def _refuse(channel: SocketChannel, reason: str) -> None:
    try:
        channel.send(Refuse(reason=reason), timeout_s=SEND_TIMEOUT_S)
    except (ChannelClosed, TimeoutError) as error:
        logger.info("a refused machine did not hear why: %s", error)
    channel.close()


def command_to_join(head: Address) -> str:
    """What to run on another machine, in the folder of its pack."""
    return f"python -m comfy_wan_dist worker --join {head}"
