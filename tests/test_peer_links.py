"""Links between a prefill and a decode engine over real sockets: who is linked, who is refused, who is lost."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from serving import wait_for

from xllm_hier.config import EngineConfig
from xllm_hier.embedded_store import free_ports
from xllm_hier.engine.pair import links as peer_links
from xllm_hier.engine.pair.links import PeerEvent, PeerLinks, differences
from xllm_hier.errors import StartupError
from xllm_hier.peer_plans import PROTOCOL, Bye, Cancel, Heartbeat, Hello
from xllm_hier.plans import TransferEndpoint

FACTS = {"model_id": "tiny", "block_size": 16, "tp_size": 1, "kv_cache_transfer_mode": "PUSH"}
SILENCE_S = 2.0
WAIT_S = 60.0


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ZeroMQ binds
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


class Cluster:
    """Engines' links in one thread, which all get a turn whenever the test waits."""

    def __init__(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.events: dict[PeerLinks, list[PeerEvent]] = {}
        self.loads: dict[PeerLinks, Heartbeat] = {}

    def decode(self, port: int = 0, **facts: Any) -> PeerLinks:
        return self._add("DECODE", "", port, facts)

    def prefill(self, *peers: PeerLinks | str, **facts: Any) -> PeerLinks:
        addresses = [peer if isinstance(peer, str) else peer.address for peer in peers]
        return self._add("PREFILL", ",".join(addresses), 0, facts)

    def _add(self, role: str, peers: str, port: int, facts: dict[str, Any]) -> PeerLinks:
        config = EngineConfig(
            model="tiny",
            enable_disagg_pd=True,
            instance_role=role,
            decode_instances=peers,
            disagg_pd_port=port,
            heart_beat_interval=0.1,
            peer_timeout_s=SILENCE_S,
        )
        numerics_id = facts.pop("numerics_id", "cpu-1")
        links = PeerLinks(self.context, config, FACTS | facts, [TransferEndpoint(0, f"{role}:1", [])], numerics_id)
        self.events[links] = []
        return links

    def turn(self, *but: PeerLinks) -> None:
        for links, events in self.events.items():
            if links not in but and not links.socket.closed:
                links.tick()
                if links.heartbeat_due:
                    links.send_heartbeat(self.loads.get(links, Heartbeat(0, 0, 0)))
                events.extend(links.receive())
                links.say_hello()

    def until(self, what: Callable[[], Any], *but: PeerLinks) -> Any:
        """Everybody but `but` goes on until `what` is true."""
        end = time.monotonic() + WAIT_S
        while not (found := what()):
            assert time.monotonic() < end, f"waited {WAIT_S:g} s in vain"
            self.turn(*but)
            time.sleep(0.005)
        return found

    def linked(self, *all_links: PeerLinks) -> None:
        self.until(lambda: all(links.linked for links in all_links))

    def kill(self, links: PeerLinks) -> None:
        """Its process ends without a word."""
        for peer in links._peers.values():
            peer.linked = False
            peer.line.close()
        links.socket.close(0)
        wait_for(lambda: is_free(links.port), WAIT_S)  # ZeroMQ closes it a moment later

    def close(self) -> None:
        for links in self.events:
            links.close()
        self.context.term()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


def test_two_that_fit_are_linked_know_each_others_endpoints_and_hear_how_busy_they_are(cluster: Cluster) -> None:
    decode = cluster.decode()
    prefill = cluster.prefill(decode)
    cluster.loads[decode] = Heartbeat(3, 1, 40)
    cluster.linked(prefill, decode)
    assert prefill.linked[0].endpoints[0].session == "DECODE:1"
    assert decode.linked[0].endpoints[0].session == "PREFILL:1"
    cluster.until(lambda: prefill.linked[0].load == Heartbeat(3, 1, 40))
    assert prefill.describe() == {decode.address: "linked"} and decode.describe() == {prefill.address: "linked"}


def test_it_does_not_matter_who_is_there_first(cluster: Cluster) -> None:
    port = free_ports(1)[0]
    prefill = cluster.prefill(f"127.0.0.1:{port}")
    for _ in range(20):
        cluster.turn()
    assert prefill.describe() == {f"127.0.0.1:{port}": "absent"}
    cluster.linked(prefill, cluster.decode(port))


def test_messages_arrive_in_order_and_name_their_sender(cluster: Cluster) -> None:
    decode = cluster.decode()
    prefill = cluster.prefill(decode)
    cluster.linked(prefill, decode)
    for number in range(50):
        prefill.send(decode.incarnation, Cancel(str(number)))
        decode.send(prefill.incarnation, Cancel(f"-{number}"))
    for links, peer, sign in ((decode, prefill, ""), (prefill, decode, "-")):
        messages = lambda links=links: [event for event in cluster.events[links] if event.message is not None]  # noqa: E731
        cluster.until(lambda messages=messages: len(messages()) == 50)
        assert [event.message.request_id for event in messages()] == [f"{sign}{number}" for number in range(50)]
        assert {event.peer for event in messages()} == {peer.incarnation}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_id", "other"),
        ("block_size", 32),
        ("tp_size", 2),
        ("kv_cache_transfer_mode", "PULL"),
        ("schema_hash of target KV blocks", "0123"),
    ],
)
def test_what_does_not_fit_is_refused_and_named_on_both_sides(cluster: Cluster, name: str, value: Any) -> None:
    decode = cluster.decode()
    prefill = cluster.prefill(decode, **{name: value})
    cluster.until(lambda: prefill.refusals)
    said = f"{name}: {value!r} at prefill, {FACTS.get(name)!r} at decode"
    assert prefill.refusals == [f"{decode.address}: {said}"]
    assert decode.describe() == {prefill.address: f"refused: {said}"}
    assert not prefill.linked and not decode.linked and cluster.events[prefill] == cluster.events[decode] == []


def test_other_bits_are_no_reason_to_refuse_but_are_known(cluster: Cluster) -> None:
    decode = cluster.decode(numerics_id="cpu-2")
    prefill = cluster.prefill(decode)
    cluster.linked(prefill, decode)
    assert prefill.mixed_numerics and decode.mixed_numerics


def test_another_version_of_the_protocol_is_named_whatever_else_it_says(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = cluster.decode()
    prefill = cluster.prefill(decode)
    cluster.until(lambda: prefill._asks[0].line.connected, decode)
    monkeypatch.setattr(peer_links, "PROTOCOL", 99)
    prefill._send(prefill._asks[0], Bye("what else"))
    monkeypatch.undo()
    said: list[str] = []
    monkeypatch.setattr(peer_links.log, "error", lambda text, *args: said.append(text % args))
    cluster.until(lambda: said)
    assert "speaks version 99 of the protocol" in said[0] and f"this one speaks {PROTOCOL}" in said[0]


def test_an_answer_in_another_version_is_a_refusal_that_says_so(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = cluster.decode()
    prefill = cluster.prefill(decode)
    decode._take_other_version("99", prefill.address)  # makes the line to it
    cluster.until(lambda: decode._peers[prefill.address].line.connected)
    monkeypatch.setattr(peer_links, "PROTOCOL", 99)
    decode._send(decode._peers[prefill.address], Bye("what else"))
    monkeypatch.undo()
    monkeypatch.setattr(prefill, "say_hello", lambda: None)
    cluster.until(lambda: prefill.refusals, decode)
    assert "it speaks version 99" in prefill.refusals[0]


def test_one_prefill_instance_does_not_decode_for_another(cluster: Cluster) -> None:
    other = cluster.prefill(f"127.0.0.1:{free_ports(1)[0]}")
    prefill = cluster.prefill(other)
    cluster.until(lambda: prefill.refusals)
    assert prefill.refusals[0].endswith("instance_role: it is PREFILL")


def test_the_end_of_a_process_is_noticed_at_once_on_either_side_and_the_next_one_is_linked(cluster: Cluster) -> None:
    port = free_ports(1)[0]
    decode = cluster.decode(port)
    prefill = cluster.prefill(decode)
    cluster.linked(prefill, decode)
    first = decode.incarnation
    cluster.kill(decode)
    cluster.until(lambda: cluster.events[prefill][-1].gone)
    assert cluster.events[prefill][-1].peer == first and not prefill.linked
    again = cluster.decode(port)
    cluster.linked(prefill, again)
    assert prefill.linked[0].incarnation == again.incarnation != first
    cluster.kill(prefill)
    cluster.until(lambda: cluster.events[again][-1].gone)
    assert cluster.events[again][-1].peer == prefill.incarnation


def test_who_is_at_a_lost_peers_address_is_told_as_the_same_or_another(cluster: Cluster) -> None:
    """A line that broke says nothing of the process behind it; one that answers again may be the one that was lost."""
    decode = cluster.decode()
    port = free_ports(1)[0]
    prefill = cluster._add("PREFILL", decode.address, port, {})
    cluster.linked(prefill, decode)
    first = prefill.incarnation
    cluster.kill(prefill)
    cluster.until(lambda: cluster.events[decode][-1].gone)
    silent: zmq.Socket[Any] = cluster.context.socket(zmq.ROUTER)
    silent.bind(f"tcp://127.0.0.1:{port}")
    cluster.until(lambda: cluster.events[decode][-1].answers)
    assert cluster.events[decode][-1].peer == first
    silent.close(0)
    cluster.until(lambda: cluster.events[decode][-1].gone)
    again = cluster._add("PREFILL", decode.address, port, {})
    cluster.linked(again, decode)
    assert [event.gone for event in cluster.events[decode] if event.peer == first][-1], "another says hello from there"


def test_the_silent_are_lost_and_linked_again_when_they_speak(cluster: Cluster) -> None:
    decode = cluster.decode()
    prefill = cluster.prefill(decode)
    cluster.linked(prefill, decode)
    cluster.until(lambda: not decode.linked, prefill)  # prefill stands still
    assert "no sign of life" in cluster.events[decode][-1].why and not cluster.events[decode][-1].gone
    cluster.events[decode].clear()
    cluster.until(lambda: len(cluster.events[prefill]) > 2 and cluster.events[prefill][-1].linked)
    lost, linked = cluster.events[prefill][-2:]
    assert "no sign of life" in lost.why and linked.linked, "it learns that it was given up, and begins anew"


def test_who_was_itself_away_does_not_take_the_silence_for_the_others(cluster: Cluster) -> None:
    decode = cluster.decode()
    prefill = cluster.prefill(decode)
    cluster.linked(prefill, decode)
    time.sleep(SILENCE_S + 0.1)
    decode.tick(away=True)
    prefill.tick(away=True)
    assert decode.linked and prefill.linked


def test_words_for_an_earlier_process_on_the_same_address_are_not_taken_by_the_next(cluster: Cluster) -> None:
    port = free_ports(1)[0]
    decode = cluster.decode(port)
    prefill = cluster.prefill(decode)
    cluster.linked(prefill, decode)
    line, incarnation = prefill.linked[0].line, prefill.linked[0].incarnation
    cluster.kill(decode)
    again = cluster.decode(port)
    cluster.linked(prefill, again)
    names = [str(peer_links.PROTOCOL), prefill.incarnation, prefill.address, incarnation]
    line.send([*(name.encode() for name in names), peer_links.pack(Cancel("old"))])
    prefill.send(again.incarnation, Cancel("new"))
    cluster.until(lambda: any(event.message for event in cluster.events[again]))
    assert [event.message for event in cluster.events[again] if event.message] == [Cancel("new")]


def test_a_stranger_is_told_that_it_is_none_of_ours_and_says_hello(cluster: Cluster) -> None:
    decode = cluster.decode()
    prefill = cluster.prefill(decode)
    cluster.linked(prefill, decode)
    peer = decode.linked[0]
    decode._lose(peer, "for a reason the other side has not heard")
    cluster.events[decode].clear()
    cluster.until(lambda: any(event.linked for event in cluster.events[decode]))
    assert any(event.why == "not linked" for event in cluster.events[prefill])


def test_whom_one_gives_up_hears_of_it_and_whether_something_may_still_be_written(cluster: Cluster) -> None:
    decode = cluster.decode()
    prefill = cluster.prefill(decode)
    cluster.linked(prefill, decode)
    cluster.events[decode].clear()
    prefill.lose(decode.incarnation, "a push failed", uncertain=True)
    linked = cluster.until(lambda: next((event.linked for event in cluster.events[decode] if event.linked), None))
    assert cluster.events[decode][0].why == "a push failed"
    assert linked.uncertain, "the next hello says so"
    cluster.linked(prefill)
    assert not prefill.linked[0].uncertain


def test_nonsense_on_the_port_is_logged_and_nothing_else(cluster: Cluster) -> None:
    decode = cluster.decode()
    prefill = cluster.prefill(decode)
    cluster.linked(prefill, decode)
    intruder: zmq.Socket[Any] = cluster.context.socket(zmq.DEALER)
    intruder.setsockopt(zmq.LINGER, 0)
    intruder.connect(f"tcp://{decode.address}")
    address, me = prefill.address.encode(), prefill.incarnation.encode()
    hello = peer_links.pack(Hello({}, "", []))
    for frames in (
        [b""],
        [b"1", b"\xff", b"", b"", b""],
        [b"1", me, address, b"", b"\x93\x01"],
        [b"1"] * 9,
        [b"99", me, b"nowhere", b"", b""],
        [b"1", me, b"", b"", hello],
        [b"1", me, b"a host:of:ours", b"", hello],
        [b"1", me, b"a host of ours:80", b"", hello],
        [b"1", b"stranger", b"127.0.0.1:1", b"", peer_links.pack(Hello("no facts", "", []))],
        [b"1", b"stranger", b"127.0.0.1:1", b"", peer_links.pack(Heartbeat(0, 0, 0))],
    ):
        intruder.send_multipart(frames)
    prefill.send(decode.incarnation, Cancel("after"))
    cluster.until(lambda: any(event.message for event in cluster.events[decode]))
    intruder.close()
    assert decode.linked


def test_a_port_that_is_taken_is_an_error_that_names_it(cluster: Cluster) -> None:
    decode = cluster.decode()
    with pytest.raises(StartupError, match=f"disagg_pd_port {decode.port}"):
        cluster.decode(decode.port)


def test_lines_to_those_that_came_and_went_are_forgotten(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_links, "_FORGET_S", 0.0)
    decode = cluster.decode()
    prefill = cluster.prefill(decode)
    cluster.linked(prefill, decode)
    cluster.kill(prefill)
    cluster.until(lambda: not decode.describe())


def test_differences_name_what_only_one_side_has() -> None:
    assert differences(prefill={"draft": None}, decode={"draft": "x"}) == "draft: None at prefill, 'x' at decode"
    assert differences(prefill={"a": 1}, decode={"a": 1}) == ""
