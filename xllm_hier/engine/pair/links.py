"""Links between the engines of prefill and decode instances: made, lost, and the messages that they carry.

Each instance has one socket on which all its peers speak to it and one to each peer, so that either side sees within
milliseconds that the other's process has ended; one that is silent for too long counts as lost, too. A message names
the incarnation it is for: one for an earlier process on the same address is dropped.

A prefill instance says Hello, a decode instance answers with a Welcome that links the two or says why not.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import zmq

from ...clock import now
from ...config import EngineConfig
from ...errors import StartupError, WireError
from ...peer_plans import PROTOCOL, Bye, Heartbeat, Hello, Welcome
from ...plans import TransferEndpoint
from ...wire import pack, unpack
from .line import Line, keep_alive

log = logging.getLogger("xllm.peers")

HELLO_AGAIN_S = 1.0  # after a refusal or a loss, while the peer's address answers
_ANSWER_LIMIT_S = 5.0  # for a Welcome
_FORGET_S = 60.0  # after its limit, a peer that came by itself and went: its way may be broken for so long
_LONGEST_MESSAGE = 256 << 20


@dataclass(eq=False)
class Peer:
    """Another instance at `address`. `incarnation` is empty until it is known; `linked`: both sides agree, as far as
    this one knows. `owes_welcome`: the answer to its Hello waits for the line."""

    address: str
    line: Line
    incarnation: str = ""
    linked: bool = False
    refused: str = ""
    endpoints: list[TransferEndpoint] = field(default_factory=list)
    load: Heartbeat = field(default_factory=lambda: Heartbeat(0, 0, 0))
    heard: float = field(default_factory=now)
    hello_at: float = 0.0  # when to say Hello next
    owes_welcome: bool = False
    former: str = ""  # the incarnation before, which may or may not have ended
    uncertain: bool = False  # a transfer to it ran past its limit since the last Hello


@dataclass(frozen=True)
class PeerEvent:
    """Something that concerns the incarnation `peer`: a `message`, or without one that it is `linked` now, or lost and
    `why`. `gone`: its process has ended, or the way to it is broken; so it may be lost twice. `answers`: somebody is at
    its address again, perhaps still itself, standing still."""

    peer: str
    message: Any = None
    linked: Peer | None = None
    why: str = ""
    gone: bool = False
    answers: bool = False


class PeerLinks:
    """All peers of one instance; used by one thread, which calls `receive` and `tick` often.

    `facts` and `endpoints` are this instance's. `mixed_numerics`: some peer computes with other bits.

    Raises:
        StartupError: the port is taken.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        config: EngineConfig,
        facts: dict[str, str | int | None],
        endpoints: list[TransferEndpoint],
        numerics_id: str = "",
    ) -> None:
        self._context = context
        self._facts, self._endpoints = facts, endpoints
        self.mixed_numerics = False
        self._numerics_id = numerics_id
        self._role = config.instance_role
        self._interval_s, self._limit_s = config.heart_beat_interval, config.peer_timeout_s
        self.incarnation = uuid.uuid4().hex
        self.socket: zmq.Socket[Any] = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 500)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, _LONGEST_MESSAGE)
        self.socket.setsockopt(zmq.IPV6, ":" in config.disagg_pd_host)
        keep_alive(self.socket)
        host = f"[{config.disagg_pd_host}]" if ":" in config.disagg_pd_host else config.disagg_pd_host
        try:
            if config.disagg_pd_port:
                self.port = config.disagg_pd_port
                self.socket.bind(f"tcp://{host}:{self.port}")
            else:
                self.port = self.socket.bind_to_random_port(f"tcp://{host}")
        except zmq.ZMQError as error:
            self.socket.close()
            raise StartupError(f"disagg_pd_port {config.disagg_pd_port} on {host} cannot be taken: {error}") from error
        self.address = f"{host}:{self.port}"
        self._asks = [Peer(address, Line(context, address)) for address in config.decode_addresses]
        self._peers = {peer.address: peer for peer in self._asks}
        self._configured = frozenset(self._peers)
        self._named: dict[str, str] = {}
        self._events: list[PeerEvent] = []
        self._next_heartbeat = 0.0

    # --------------------------------------------------------------------------------------------- the peers

    @property
    def linked(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.linked]

    def find(self, incarnation: str) -> Peer | None:
        """The linked peer of this name."""
        return next((peer for peer in self.linked if peer.incarnation == incarnation), None)

    def ask(self, instances: Mapping[str, str]) -> None:
        """The decode instances that a registry has now: address by name. They are asked beside the configured ones; an
        instance that has left the registry is asked no more once it is lost."""
        self._named = dict(instances)
        for address in instances.values():
            try:
                peer = self._peer_at(address)
            except ValueError as error:
                log.error("the registry has a decode instance that cannot be reached: %s", error)
                continue
            if peer not in self._asks:
                self._asks.append(peer)

    def named(self, name: str) -> str:
        """Address of the instance that the registry has under this name; else it may be an address itself."""
        return self._named.get(name, name)

    @property
    def refusals(self) -> list[str]:
        """Why configured peers do not work with this instance, of those that said so."""
        return [f"{peer.address}: {peer.refused}" for peer in self._asks if peer.refused]

    def describe(self) -> dict[str, str]:
        """For people: each peer's address and state."""
        return {
            peer.address: "linked" if peer.linked else f"refused: {peer.refused}" if peer.refused else "absent"
            for peer in self._peers.values()
        }

    # -------------------------------------------------------------------------------------------- messages

    def send(self, incarnation: str, message: Any) -> None:
        """Queue a message for a linked peer; for one that is lost it is dropped, and its loss is an event."""
        peer = self.find(incarnation)
        if peer is not None:
            self._send(peer, message)

    def _send(self, peer: Peer, message: Any) -> None:
        names = [str(PROTOCOL), self.incarnation, self.address, peer.incarnation]
        peer.line.send([*(name.encode() for name in names), pack(message)])

    def receive(self) -> list[PeerEvent]:
        """Events since the last call, losses included."""
        while self.socket.poll(0):
            _, *frames = self.socket.recv_multipart()
            try:
                version, sender, address, receiver = (frame.decode("ascii") for frame in frames[:4])
                if len(frames) != 5:
                    raise WireError(f"{len(frames)} frames")
                self._take(version, sender, address, receiver, frames[4])
            except (ValueError, TypeError, AttributeError, WireError) as error:
                log.error("a message that is none of a peer's was dropped: %s", error)
        events, self._events = self._events, []
        return events

    def _take(self, version: str, sender: str, address: str, receiver: str, payload: bytes) -> None:
        if version != str(PROTOCOL):
            self._take_other_version(version, address)
            return
        if receiver and receiver != self.incarnation:
            return  # for a process that was here before
        message = unpack(payload)
        peer = self._peers.get(address)
        if isinstance(message, Hello):
            self._on_hello(sender, address, message)
        elif isinstance(message, Welcome):
            if peer is not None and not peer.linked and peer.line.connected:  # else the way there broke meanwhile
                self._on_welcome(peer, sender, message)
        elif peer is None or not peer.linked or peer.incarnation != sender:
            if not isinstance(message, Bye):
                self._answer_stranger(sender, address)
        elif isinstance(message, Bye):
            self._lose(peer, message.why)
        else:
            peer.heard = now()
            if isinstance(message, Heartbeat):
                peer.load = message
            else:
                self._events.append(PeerEvent(peer.incarnation, message))

    def _take_other_version(self, version: str, address: str) -> None:
        """Tell a peer of another version the version that is spoken here: it can read the envelope."""
        problem = f"it speaks version {version} of the protocol between instances, this one speaks {PROTOCOL}"
        peer = self._peers.get(address)
        if peer in self._asks:
            assert peer is not None
            self._refuse(peer, problem)
        else:
            log.error("the instance at %s is not linked: %s", address, problem)
            self._send(self._peer_at(address), Bye(problem))

    def _answer_stranger(self, sender: str, address: str) -> None:
        peer = self._peer_at(address)
        if not peer.linked:
            peer.incarnation = sender
            self._send(peer, Bye("not linked"))

    # --------------------------------------------------------------------------------------------- linking

    def _peer_at(self, address: str) -> Peer:
        """The peer that is reached at `address`, known or new; a new one's line takes a moment to connect."""
        if address not in self._peers:
            self._peers[address] = Peer(address, Line(self._context, address))
        return self._peers[address]

    def _on_hello(self, sender: str, address: str, hello: Hello) -> None:
        peer = self._peer_at(address)
        if peer.linked:  # it begins anew; another incarnation has its address only after the end of the first
            self._lose(peer, "it says hello again", gone=peer.incarnation != sender)
        if peer.former and peer.former != sender:
            self._events.append(PeerEvent(peer.former, why="another process has its address", gone=True))
        peer.former = ""
        peer.incarnation, peer.uncertain = sender, hello.uncertain
        self._learn(peer, hello)
        peer.refused = f"instance_role: it is {self._role}" if self._role != "DECODE" else ""
        peer.refused = peer.refused or differences(prefill=hello.facts, decode=self._facts)
        peer.linked = not peer.refused
        self._welcome(peer)
        if peer.linked:
            log.info("linked with the prefill instance at %s", address)
            self._events.append(PeerEvent(sender, linked=peer))
        else:
            log.error("the prefill instance at %s is refused: %s", address, peer.refused)

    def _welcome(self, peer: Peer) -> None:
        peer.owes_welcome = not peer.line.connected
        if not peer.owes_welcome:
            self._send(peer, Welcome(self._facts, self._numerics_id, self._endpoints, peer.refused))

    def _on_welcome(self, peer: Peer, sender: str, welcome: Welcome) -> None:
        peer.incarnation = sender
        problem = welcome.refused or differences(prefill=self._facts, decode=welcome.facts)
        if problem:
            self._refuse(peer, problem)
            return
        peer.linked, peer.refused, peer.uncertain = True, "", False
        self._learn(peer, welcome)
        log.info("linked with the decode instance at %s", peer.address)
        self._events.append(PeerEvent(sender, linked=peer))

    def _learn(self, peer: Peer, message: Hello | Welcome) -> None:
        peer.heard, peer.endpoints = now(), message.endpoints
        if message.numerics_id != self._numerics_id:
            self.mixed_numerics = True
            log.warning(
                "%s computes as %s, this instance as %s: their bits may differ",
                peer.address,
                message.numerics_id,
                self._numerics_id,
            )

    def _refuse(self, peer: Peer, problem: str) -> None:
        if peer.refused != problem:
            log.error("the instance at %s does not work with this one: %s", peer.address, problem)
        peer.refused, peer.hello_at = problem, now() + HELLO_AGAIN_S
        if peer.linked:
            self._lose(peer, problem)

    def _lose(self, peer: Peer, why: str, *, gone: bool = False) -> None:
        if peer.linked:
            log.warning("lost the instance at %s: %s", peer.address, why)
            self._events.append(PeerEvent(peer.incarnation, why=why, gone=gone))
        elif gone and (peer.incarnation or peer.former):
            self._events.append(PeerEvent(peer.incarnation or peer.former, why=why, gone=True))
        peer.linked, peer.hello_at = False, now() + HELLO_AGAIN_S

    def lose(self, incarnation: str, why: str, *, uncertain: bool = False) -> None:
        """Give a peer up, and tell it; both may link again. `uncertain`: something may still be written there."""
        peer = self.find(incarnation)
        for one in [peer] if peer is not None else self._asks:  # which of them it was, once it is lost, nobody knows
            one.uncertain |= uncertain
        if peer is not None:
            self._send(peer, Bye(why))
            self._lose(peer, why)

    # ------------------------------------------------------------------------------------------------ time

    def tick(self, *, away: bool = False) -> None:
        """Notice ends and silences, say hello and good-bye where it is due. `away`: this process itself stood still a
        moment ago."""
        moment = now()
        for peer in list(self._peers.values()):
            for connected in peer.line.news():
                if not connected:
                    self._lose(peer, "its process has ended, or the way to it is broken", gone=True)
                    peer.former, peer.incarnation, peer.refused = peer.incarnation or peer.former, "", ""
                    continue
                if peer.former:
                    self._events.append(PeerEvent(peer.former, why="its address answers again", answers=True))
                if peer.owes_welcome:
                    self._welcome(peer)
                else:
                    peer.hello_at = moment
            if away:
                peer.heard = moment
            if peer.linked and moment - peer.heard > self._limit_s:
                self._send(peer, Bye(f"no sign of life for {self._limit_s:g} s"))
                self._lose(peer, f"no sign of life for {self._limit_s:g} s")
        wanted = self._configured.union(self._named.values())
        self._asks = [peer for peer in self._asks if peer.address in wanted or peer.linked]
        self._forget_strangers()

    @property
    def heartbeat_due(self) -> bool:
        """It is time for `send_heartbeat`."""
        return now() >= self._next_heartbeat

    def send_heartbeat(self, load: Heartbeat) -> None:
        """Tell all linked peers the load of this instance."""
        self._next_heartbeat = now() + self._interval_s
        for peer in self.linked:
            self._send(peer, load)

    def say_hello(self) -> None:
        """Ask those peers that are there and not linked; only while no transfer of this instance is under way."""
        for peer in self._asks:
            if not peer.linked and peer.line.connected and now() >= peer.hello_at:
                peer.incarnation, peer.hello_at = "", now() + _ANSWER_LIMIT_S
                self._send(peer, Hello(self._facts, self._numerics_id, self._endpoints, peer.uncertain))

    def _forget_strangers(self) -> None:
        """Lines to peers that came by themselves and are gone: nobody needs them."""
        for address, peer in list(self._peers.items()):
            idle = not peer.linked and not peer.line.connected and now() - peer.heard > self._limit_s + _FORGET_S
            if idle and peer not in self._asks:
                peer.line.close()
                del self._peers[address]

    def close(self) -> None:
        """Say good-bye and close the sockets; a second call does nothing."""
        if self.socket.closed:
            return
        for peer in self.linked:
            self._send(peer, Bye("the instance stops"))
        for peer in self._peers.values():
            peer.linked = False
            peer.line.close()
        self.socket.close()


def differences(*, prefill: dict[str, str | int | None], decode: dict[str, str | int | None]) -> str:
    """The facts that differ between two instances and must not; empty when none does."""
    return "; ".join(
        f"{name}: {prefill.get(name)!r} at prefill, {decode.get(name)!r} at decode"
        for name in dict.fromkeys([*prefill, *decode])
        if prefill.get(name) != decode.get(name)
    )
