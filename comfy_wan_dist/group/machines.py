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

import logging
from dataclasses import dataclass

from ..ipc.channel import ChannelClosed, SocketChannel
from ..ipc.errors import (
    MachineLost,
    ProtocolError,
    VersionMismatch,
    WorkerDied,
    WorkerStartError,
)
from ..ipc.messages import Arrive, Hello, Join, Refuse
from ..ipc.tcp import Address, interface_of, listen, watch
from .folder import same_secret
from .listener import RankConnection
from .spec import LaunchSpec

# Both say their first word at once; the start waits meanwhile.
FIRST_WORD_TIMEOUT_S = 2.0
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
            return MachineLost(f"machine {self.host} is lost: {error}")
        if isinstance(message, Refuse):
            return WorkerDied(f"machine {self.host} gave up: {message.reason}")
        return MachineLost(f"machine {self.host} said {type(message).__name__} out of turn")


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
        try:
            # Held open until the launcher has it, so that nobody else takes the port.
            self.store = listen(Address(host=spec.machines.head.host, port=0))
            ip, port = self.store.getsockname()[:2]
            self.store_address = Address(host=ip, port=port)
        except BaseException:
            self._socket.close()
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
        return self._socket.fileno()

    def accept(self) -> RankConnection | None:
        """Let a machine join, or a rank of one in. None unless it is a rank.

        Raises WorkerStartError for a machine with another version of this project.
        """
        try:
            connection, address = self._socket.accept()
        except OSError:
            return None
        ip = str(address[0])
        channel = SocketChannel(connection)
        try:
            watch(connection)
            message = channel.receive(FIRST_WORD_TIMEOUT_S).message
            if isinstance(message, Hello):
                return self._admit_rank(message, ip, channel)
            if isinstance(message, Arrive):
                self._admit_machine(message, ip, channel)
                return None
            raise ProtocolError(f"it began with {type(message).__name__}")
        except VersionMismatch as error:
            _refuse(channel, str(error))
            raise WorkerStartError(
                f"machine {ip} wants to join with another version of Wan Dist ({error}); "
                "install the same one on all machines"
            ) from error
        except (ProtocolError, ChannelClosed, TimeoutError, OSError) as error:
            logger.warning("refused a connection from %s to the worker group: %s", ip, error)
            channel.close()
            return None

    def close_store(self) -> None:
        """Let go of the store's socket, which the launcher has by now."""
        self.store.close()

    def close(self) -> None:
        """Let nobody in any more. Machines that have joined stay."""
        self._socket.close()
        self.store.close()

    def _admit_machine(self, arrival: Arrive, ip: str, channel: SocketChannel) -> None:
        if not self.missing:
            _refuse(channel, f"the group has its {self._count} machines already")
            return
        number = len(self.joined) + 1
        spec = self._spec
        join = Join(
            node=number,
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


def _refuse(channel: SocketChannel, reason: str) -> None:
    try:
        channel.send(Refuse(reason=reason), timeout_s=SEND_TIMEOUT_S)
    except (ChannelClosed, TimeoutError) as error:
        logger.info("a refused machine did not hear why: %s", error)
    channel.close()


def command_to_join(head: Address) -> str:
    """What to run on another machine, in the folder of its pack."""
    return f"python -m comfy_wan_dist worker --join {head}"
