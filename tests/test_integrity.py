"""Bits that flip, keys that lie, weights that changed: never a wrong token, always a counted miss."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import test_laws as laws
import test_ranks_and_tiers as tiers
import test_transfer as transfers
import torch
from safetensors.torch import load_file, save_file
from serving import Server, running_store, store_flags
from tiny_models import VOCAB, llama, make

from xllm_hier.block import TRAILER_BYTES, BlockType, CacheLayout, CacheRole
from xllm_hier.config import EngineConfig
from xllm_hier.embedded_store import EmbeddedStore
from xllm_hier.errors import StoreError
from xllm_hier.hashing import prompt_hashes, root_hash
from xllm_hier.models.identity import PLACE_BYTES, PLACES, ModelIdentity, model_identity
from xllm_hier.plans import HIT, MISS
from xllm_hier.store_key import IDENTITY, MAIN, identity_key, name_space_regex, numerics_key
from xllm_hier.worker.store.connection import VAIN_LOOKS
from xllm_hier.worker.store.key_quarantine import MAX_KEYS, KeyQuarantine
from xllm_hier.worker.store.kv_cache_store import KVCacheStore
from xllm_hier.worker.store.marks import IdentityUnknownError
from xllm_hier.worker.store.objects import name_blocks
from xllm_hier.worker.tiers.cache_domain import BlockCache, CacheDomain
from xllm_hier.worker.tiers.proof import Trailer
from xllm_hier.worker.transfer_stats import TransferStats

COMMON = ["--block_size=16", "--max_cache_size=4MB", "--check_invariants"]
FLAGS = range(12, 16)  # bytes of a trailer that say nothing yet

rank_with = laws.rank_with


@pytest.fixture
def world() -> Iterator[transfers.World]:
    made = transfers.World(transfers.native())
    yield made
    assert made.transfer.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model") / "tiny", "llama")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EmbeddedStore]:
    (tmp_path / "store").mkdir()
    with running_store(tmp_path / "store") as running:
        yield running


def meaning_bytes(payload_bytes: int) -> list[int]:
    """The bytes of a host object in which a flipped bit matters: not those of the padding, not the free ones."""
    start = -(-payload_bytes // 64) * 64
    return [*range(payload_bytes), *(start + byte for byte in range(TRAILER_BYTES) if byte not in FLAGS)]


def counted_failures(stats: TransferStats, kind: str) -> dict[str, int]:
    return {one.cause: one.count for one in stats.snapshot().transfer_failures if one.kind == kind and one.count}


def failures(stats: dict[str, Any], kind: str) -> dict[str, int]:
    return {cause: count for what, cause, count in stats["transfer_failures"] if what == kind and count}


# --------------------------------------------------------------------------------------------- host to device


def test_one_flipped_bit_of_a_host_block_fails_its_load_and_no_other(world: transfers.World) -> None:
    dice = random.Random(4)
    world.offload(range(6), range(6))
    expected = world.bytes_of(range(6))
    assert world.cache.host is not None
    places = meaning_bytes(world.cache.layout.payload_bytes)
    payload, trailer = places[:-60], places[-60:]
    for number in range(60):
        block, byte = dice.randrange(6), dice.choice(trailer if number % 3 == 0 else payload)
        bit = 1 << dice.randrange(8)
        others = [other for other in range(6) if other != block]
        world.cache.host[block, byte] ^= bit
        first = world.load([block, (block + 1) % 6], [block, (block + 1) % 6], 2 * number)
        assert first.finish() == [2 * number], (block, byte, bit)
        assert world.load(others, others, 2 * number + 1).finish() == []
        world.cache.host[block, byte] ^= bit
    assert world.load(range(6), range(6), 1000).finish() == []
    assert torch.equal(world.bytes_of(range(6)), expected)
    counted = counted_failures(world.stats, "h2d")
    assert sum(counted.values()) == 60 and counted["checksum"] >= 40 and "copy" not in counted


def test_the_copies_do_not_wait_for_the_proof_and_the_end_of_the_load_does(world: transfers.World) -> None:
    world.offload([0, 1], [0, 1])
    gate = threading.Event()
    world.transfer.loads.proofs.submit(gate.wait)
    world.cache.payload(1)[5] ^= 1
    waiter = world.load([2, 3], [0, 1], 7)
    for layer in range(7):
        waiter(layer)
    ended: list[int] = []
    end = threading.Thread(target=lambda: ended.extend(waiter.finish()))
    end.start()
    end.join(0.1)
    assert end.is_alive(), "nobody may use what was computed before the proof is there"
    gate.set()
    end.join(transfers.LIMIT_S)
    assert ended == [7]


def test_switched_off_a_flipped_bit_passes_and_nothing_is_verified(world: transfers.World) -> None:
    world.transfer.loads.verify = False
    world.offload([0], [0])
    world.cache.payload(0)[5] ^= 1
    assert world.load([1], [0]).finish() == []


def test_what_all_ranks_hold_alike_is_verified_by_the_one_that_keeps_it(tmp_path: Path, store: EmbeddedStore) -> None:
    (tmp_path / "meetings").mkdir()
    instance = tiers.Instance(tmp_path / "meetings", store, 2, replicated=True)
    for rank in instance.ranks:
        rank.fill(0)
    instance.offload()
    instance.ranks[0].cache.payload(tiers.HOST[1])[9] ^= 4
    errors = []
    for rank in instance.ranks:
        rank.transfer.load_from_host(transfers.TransferBlocks(9, [tiers.mapping(tiers.BLOCKS, tiers.HOST)]))
        (load,) = rank.transfer.attach_loads()
        load.wait_all(transfers.LIMIT_S)
        errors.append(load.error)
    assert errors[1] is None and "checksum" in (errors[0] or "")
    assert [counted_failures(rank.stats, "h2d") for rank in instance.ranks] == [{"checksum": 1}, {}]
    instance.close()


# ------------------------------------------------------------------------------------------ quarantine of keys


def test_a_key_whose_object_did_not_prove_itself_is_neither_read_nor_written_for_a_while(
    rank_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks; the second one's object is damaged: it is removed and asked for no more, and then written anew."""
    rank = rank_with(laws.MAIN_DOMAIN)
    rank.put((0, 0), (1, 1))
    first, second = rank.client.keys("put")
    rank.client.objects[second] = rank.client.objects[first]
    assert rank.get((2, 0), (3, 1)) == [1, 0] and rank.client.keys("remove") == [second]
    rank.client.calls.clear()
    assert rank.put((1, 1)) == 1 and rank.get((3, 1)) == [0] and rank.client.calls == []
    assert rank.put((0, 0), (1, 1)) == 2 and rank.get((2, 0), (3, 1)) == [1, 0]
    assert second not in rank.client.keys("exist") + rank.client.keys("get") + rank.client.keys("put")
    rank.client.objects[second] = rank.client.objects[first]  # somebody has put it there again
    assert rank.store.probe(BlockType.KV, [laws.name_of(0), laws.name_of(1)]) == bytes([HIT, MISS])
    del rank.client.objects[second]
    counted = rank.store.stats.snapshot().store
    names = ("quarantined_keys", "quarantined_reads", "quarantined_writes")
    assert [counted[name] for name in names] == [1, 2, 2]
    monkeypatch.setattr("xllm_hier.worker.store.key_quarantine.KEY_QUARANTINE_S", 0.0)
    rank.fill(1, laws.name_of(1))
    assert rank.put((1, 1)) == 1 and rank.get((3, 1)) == [1]


def test_a_client_that_moves_no_bytes_where_a_new_one_could_is_set_up_anew_once_in_an_outage(
    rank_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library can miss that the node's client is another process. One look may come too early; a new client that
    does not help, as with a full store, is not followed by more; once one helped, the next outage may have one."""
    rank = rank_with(laws.MAIN_DOMAIN)
    store, made, works = rank.store, list[int](), [False]
    monkeypatch.setattr(rank.client, "through_node", True)
    monkeypatch.setattr(rank.client, "reachable", lambda: True, raising=False)
    monkeypatch.setattr(rank.client, "answers", lambda: True, raising=False)
    monkeypatch.setattr(rank.client, "connect", made.append, raising=False)

    def objection() -> str:
        if not works[0]:
            raise IdentityUnknownError("it can neither be read nor written")
        return ""

    monkeypatch.setattr(store.connection.marks, "objection", objection)
    for number in range(2):
        works[0] = False
        store.circuit.fail("gone")
        for looks in range(1, 5):
            with pytest.raises(IdentityUnknownError):
                store.look()
            assert len(made) == number + (looks >= VAIN_LOOKS), "of a number of looks one makes a client"
        works[0] = True
        store.look()
        assert store.state != "open" and len(made) == number + 1
    assert not store.connection.host_usable, "what the new client reads goes through its own memory"


def test_the_quarantine_has_a_bound_and_forgets_the_oldest_first() -> None:
    quarantine = KeyQuarantine()
    for number in range(MAX_KEYS + 3):
        quarantine.add(str(number))
        quarantine.add("bad again and again")
    assert len(quarantine) == MAX_KEYS
    assert quarantine.held(["0", "3", "4", str(MAX_KEYS), "bad again and again", "never bad"]) == {
        "4",
        str(MAX_KEYS),
        "bad again and again",
    }


# ------------------------------------------------------------------------------------------ identity of a model


def changed(folder: Path, target: Path, name: str, byte: int) -> Path:
    """A copy of a checkpoint in which one bit of one tensor is another."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    tensors[name].view(torch.uint8).view(-1)[byte] ^= 1
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def with_config(folder: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return target


BF16 = torch.bfloat16


def test_a_model_is_the_same_wherever_it_lies_and_however_its_files_are_cut(tmp_path: Path, model: Path) -> None:
    ours = model_identity(model, BF16)
    unimportant = {"_name_or_path": "/elsewhere", "transformers_version": "9", "torch_dtype": "float32"}
    assert model_identity(with_config(model, tmp_path / "copy", **unimportant, eos_token_id=7), BF16) == ours
    whole = llama()
    whole.load_state_dict(load_file(model / "model.safetensors"), strict=False)
    whole.save_pretrained(tmp_path / "cut", max_shard_size="60KB")
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) > 2
    assert model_identity(tmp_path / "cut", BF16).weights == ours.weights


def test_other_weights_another_dtype_and_another_rope_are_told_apart_and_named(tmp_path: Path, model: Path) -> None:
    ours = model_identity(model, BF16)
    name = "model.layers.1.mlp.down_proj.weight"
    last = 72 * 104 * 4 - 1
    for number, byte in enumerate((0, PLACE_BYTES - 1, last)):
        other = changed(model, tmp_path / f"{number}", name, byte)
        assert ours.difference(model_identity(other, BF16).text) == "weights"
    rope = with_config(model, tmp_path / "rope", rope_parameters={"rope_theta": 5000.0, "rope_type": "default"})
    assert ours.difference(model_identity(rope, BF16).text) == "config"
    assert ours.difference(model_identity(model, torch.float32).text) == "dtype"
    assert ours.difference(model_identity(rope, torch.float32).text) == "config and dtype"
    assert ours.difference(ours.text) == "" and ours.difference("of another version") == "config and weights and dtype"


def test_a_bit_between_the_sampled_places_is_not_seen(tmp_path: Path, model: Path) -> None:
    """The limit of it: 16 places of 64 bytes out of 29,952 are looked at, and a retouched weight may lie between."""
    name = "model.layers.1.mlp.down_proj.weight"
    assert PLACES * PLACE_BYTES < 72 * 104 * 4
    other = changed(model, tmp_path / "other", name, PLACE_BYTES)
    assert model_identity(other, BF16) == model_identity(model, BF16)


class SharedClient(laws.ScriptedClient):
    """Scripted clients of one store: what one puts the others find."""

    shared: ClassVar[dict[str, bytes]] = {}

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.objects = self.shared

    def reachable(self) -> bool:
        return True

    def remove_matching(self, regex: str) -> int:
        matching = [key for key in self.objects if re.match(regex, key)]
        for key in matching:
            del self.objects[key]
        return len(matching)


@pytest.fixture
def instances(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes the store of one more instance with this identity, over objects that all of them share."""
    monkeypatch.setattr("xllm_hier.worker.store.kv_cache_store.MooncakeClient", SharedClient)
    monkeypatch.setattr("xllm_hier.worker.store.marks._PAUSE_S", 0.0)
    monkeypatch.setattr(SharedClient, "shared", {})
    made: list[KVCacheStore] = []

    def start(weights: str, rank: int = 0) -> KVCacheStore:
        config = EngineConfig(model_id="m", enable_kvcache_store=True, host_blocks_factor=2.0)
        identity = ModelIdentity("c", weights, "bfloat16")
        store = KVCacheStore(config, rank, TransferStats(), numerics_id="n", identities={MAIN: identity})
        memory = torch.zeros(4, laws.OBJECT, dtype=torch.uint8)
        cache = BlockCache(laws.LAYOUT, [], memory)
        layout = CacheLayout(CacheRole.TARGET, (laws.LAYOUT,))
        domain = CacheDomain(CacheRole.TARGET, MAIN, layout, {BlockType.KV: cache})
        name_blocks(domain, config, rank, identity.text)
        store.start([domain], memory.data_ptr(), memory.nbytes)
        made.append(store)
        return store

    yield start
    for store in made:
        assert store.close()


KEY = identity_key("m", MAIN)
BLOCK = (BlockType.KV, [0], [laws.name_of(1)])


def test_the_first_instance_names_the_model_of_a_name_space_and_another_model_is_refused(
    instances: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first = instances("a")
    assert (first.state, first.refused) == ("attached", "") and KEY in SharedClient.shared
    assert instances("a").state == instances("a", rank=1).state == "attached"
    for rank in (0, 1):
        refused = instances("b", rank)
        assert refused.state == "detached" and "under model id 'm': other weights" in refused.refused
        refused.client.calls.clear()
        assert list(refused.prefetch(*BLOCK)) == [0] and refused.put(*BLOCK) == 0
        assert refused.client.calls == []
    assert "--model_id" in caplog.text and "/cache/clear" in caplog.text


def test_a_refused_instance_gets_in_once_the_name_space_is_empty_and_it_is_attached_again(instances: Any) -> None:
    """Its clear takes everything; then the one that was first, should it still run, is the one to be refused."""
    first, refused = instances("a"), instances("b")
    first.put(*BLOCK)
    with pytest.raises(StoreError, match="other weights"):
        refused.circuit.wanted()
        refused.look()
    assert refused.state == "detached"
    assert refused.clear() == 4 and SharedClient.shared == {}, "block, identity, two numerics marks"
    refused.circuit.wanted()
    refused.look()
    assert refused.refused == "" and refused.put(*BLOCK) == 1
    first.connection.look_at_marks()
    assert first.state == "detached" and "other weights" in first.refused


def test_who_clears_and_goes_on_leaves_its_identity_anew_at_once(instances: Any) -> None:
    first = instances("a")
    first.put(*BLOCK)
    first.clear()
    assert set(SharedClient.shared) == {KEY, *(numerics_key("m", "tp1", what) for what in ("n", "any"))}
    assert instances("b").state == "detached"


def test_an_identity_that_was_evicted_is_left_anew_and_a_damaged_one_is_replaced(instances: Any) -> None:
    first = instances("a")
    del SharedClient.shared[KEY]
    first.connection.look_at_marks()
    assert instances("b").state == "detached"
    raw = bytearray(SharedClient.shared[KEY])
    raw[3] ^= 1
    SharedClient.shared[KEY] = bytes(raw)
    first.connection.look_at_marks()
    assert first.state == "attached" and SharedClient.shared[KEY] != bytes(raw)


def test_a_store_that_neither_gives_nor_takes_an_identity_is_not_used_before_it_does(instances: Any) -> None:
    first = instances("a")
    unreadable = instances("a")
    unreadable.circuit.fail("away")
    unreadable.client.get_codes = [-800]
    with pytest.raises(StoreError, match="can neither be read nor written"):
        unreadable.look()
    assert unreadable.state == "open"
    first.client.get_codes = [-800]
    first.connection.look_at_marks()
    assert first.state == "attached", "who has compared it before goes on"


def test_an_identity_that_another_rank_is_still_writing_is_waited_for(
    instances: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Till its write ends the key is not there, and a put of ours is answered "there already"."""
    instances("a")
    written = SharedClient.shared.pop(KEY)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 10:
            SharedClient.shared[KEY] = written

    monkeypatch.setattr("xllm_hier.worker.store.marks.time.sleep", pause)
    monkeypatch.setattr(SharedClient, "put", lambda self, keys, *_: [0] * len(keys))
    assert instances("a", rank=1).state == "attached"
    assert len(pauses) == 10


def test_who_reads_the_same_objects_is_told_by_the_target_alone(rank_with: Any) -> None:
    """A draft whose ranks share their blocks makes no difference: no answer depends on a draft's bits."""
    shared = dataclasses.replace(laws.DRAFT_LAYOUT, replicated=True)
    assert (
        rank_with(laws.MAIN_DOMAIN, (CacheRole.DRAFT, laws.DRAFT_DOMAIN[1], shared)).store.connection.readers == "tp1"
    )
    latents = dataclasses.replace(laws.LAYOUT, replicated=True)
    assert rank_with((CacheRole.TARGET, MAIN, latents), laws.DRAFT_DOMAIN).store.connection.readers == "mla"


def test_the_name_space_regex_takes_the_marks_of_one_model_along() -> None:
    for name in ("m.1", "a(b)"):
        for key in (identity_key(name, MAIN), numerics_key(name, "tp1", "any")):
            assert re.match(name_space_regex(name), key)
            assert not re.match(name_space_regex(name + "x"), key) and not re.match(name_space_regex("mx1"), key)


# ---------------------------------------------------------------------------------------------- real processes


class HostBits:
    """The host blocks of a worker, written to from outside of its process."""

    def __init__(self, pid: int) -> None:
        maps = Path(f"/proc/{pid}/maps").read_text()
        spans = [line.split()[0] for line in maps.splitlines() if "memfd:xllm-host" in line]
        self.spans = [tuple(int(edge, 16) for edge in span.split("-")) for span in spans]
        assert self.spans, "no host tier in this worker"
        try:
            self._memory = os.open(f"/proc/{pid}/mem", os.O_RDWR)
            os.pwrite(self._memory, os.pread(self._memory, 1, self.spans[0][0]), self.spans[0][0])
        except OSError as error:
            pytest.skip(f"the memory of another process cannot be written here: {error}")

    def flip(self, block_hash: bytes, dice: random.Random) -> None:
        """One random payload bit of this block, wherever it lies or has lain."""
        bit, place = 1 << dice.randrange(8), dice.random()
        found = 0
        for start, stop in self.spans:
            raw = os.pread(self._memory, stop - start, start)
            at = -1
            while (at := raw.find(Trailer.MAGIC, at + 1)) >= 0:
                if Trailer.block_hash(raw[at : at + 64]) != block_hash:
                    continue
                payload_bytes = int.from_bytes(raw[at + 56 : at + 64], "little")
                byte = at - -(-payload_bytes // 64) * 64 + int(place * payload_bytes)
                os.pwrite(self._memory, bytes([raw[byte] ^ bit]), start + byte)
                found += 1
        assert found

    def close(self) -> None:
        os.close(self._memory)


def prompts(count: int) -> list[list[int]]:
    dice = random.Random(5)
    return [[dice.randrange(3, VOCAB) for _ in range(100 + 7 * number)] for number in range(count)]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_bits_that_flip_in_host_memory_never_reach_an_answer(model: Path, tp_size: int) -> None:
    dice = random.Random(tp_size)
    asked = prompts(3)
    with Server(model, *COMMON, "--host_blocks_factor=3", f"--tp_size={tp_size}") as server:
        workers = [HostBits(server.child(f"worker-{rank}").pid) for rank in range(tp_size)]
        expected = [server.ask(prompt).bits for prompt in asked]
        for number in range(1, 13):
            index = dice.randrange(len(asked))
            server.ask(asked[index])
            server.wait_quiet()
            server.clear("device")
            if number % 4 == 0:
                assert server.ask(asked[index]).cached[1] >= 96, "whole blocks are still served from the host"
                server.clear("device")
            dice.choice(workers).flip(dice.choice(prompt_hashes(asked[index], 16, root_hash())), dice)
            answer = server.ask(asked[index])
            assert answer.bits == expected[index] and answer.cached == (0, 0, 0)
            stats = server.wait_quiet()
            assert failures(stats, "h2d") == {"checksum": number} and stats["failed_loads"] == number
        for worker in workers:
            worker.close()


@pytest.mark.parametrize("tp_size", [1, 2])
def test_bits_that_flip_in_the_store_never_reach_an_answer_and_their_keys_are_left_alone(
    model: Path, store: EmbeddedStore, tp_size: int
) -> None:
    from mooncake.store import MooncakeDistributedStore

    dice = random.Random(tp_size)
    with Server(model, *COMMON, *store_flags(store), f"--tp_size={tp_size}") as server:
        writer = MooncakeDistributedStore()
        assert writer.setup_dummy(32 << 20, 16 << 20, store.client_address) == 0
        damaged = []
        for number, prompt in enumerate(prompts(6), 1):
            expected = server.ask(prompt).bits
            server.wait_quiet()
            block_hash = dice.choice(prompt_hashes(prompt, 16, root_hash())).hex()
            key = dice.choice([key for key in tiers.keys(store) if key.endswith(block_hash)])
            raw = bytearray(writer.get(key))
            payload_bytes = int.from_bytes(raw[-8:], "little")
            raw[dice.choice(meaning_bytes(payload_bytes))] ^= 1 << dice.randrange(8)
            assert writer.remove(key, True) == 0 and writer.put(key, bytes(raw)) == 0
            damaged.append(key)
            for _ in range(2):
                server.clear("device", "host")
                assert server.ask(prompt).bits == expected
                stats = server.wait_quiet()
            assert sum(failures(stats, "g2h").values()) == number
        assert not set(damaged) & set(tiers.keys(store)), "not written anew at once"
        assert stats["store"]["quarantined_keys"] == 6 <= stats["store"]["quarantined_writes"]
        assert server.health()["store"] in ("attached", "degraded")
        writer.close()


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_another_model_under_one_id_gives_its_own_answers_and_uses_no_store(
    tmp_path: Path, store: EmbeddedStore, family: str
) -> None:
    """Two ranks of each. Once nobody serves the first any more, the second empties the name space and moves in."""
    one, two = (make(tmp_path / f"{seed}" / "tiny", family, seed=seed) for seed in (0, 1))
    prompt = prompts(1)[0]
    flags = [*COMMON, "--tp_size=2", "--model_id=one"]
    with Server(two, *flags) as server:
        expected = server.ask(prompt).bits
    flags += store_flags(store)
    with Server(one, *flags) as server:
        assert server.ask(prompt).token_ids != expected[0]
        assert server.wait_quiet()["store_refused"] == ""
    before = tiers.keys(store)
    with Server(two, *flags) as server:
        for _ in range(2):
            answer = server.ask(prompt)
            assert answer.bits == expected and answer.tiers["store"] == 0
            stats = server.wait_quiet()
            server.clear("device", "host")
        assert stats["store_state"] == server.health()["store"] == "detached"
        assert "other weights" in stats["store_refused"] and "--model_id" in server.log()
        assert tiers.keys(store) == before and stats["transfer_bytes"]["g2h"] == stats["transfer_bytes"]["h2g"] == 0
        told = server.admin("PUT", "store")
        assert told["state"] == "detached" and "other weights" in told["why"]
        server.clear("store")
        assert not [key for key in store._http("/get_all_keys").split() if key.startswith("xllm-")]
        assert server.admin("PUT", "store")["state"] in ("attached", "degraded")
        assert [key.startswith(IDENTITY) for key in store._http("/get_all_keys").split()].count(True) == 1
        server.clear("device", "host")
        server.ask(prompt)
        assert server.wait_quiet()["store_refused"] == ""
        server.clear("device", "host")
        again = server.ask(prompt)
        assert again.bits == expected and again.tiers["store"] == 96
