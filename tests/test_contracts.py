"""Hashes, keys, layouts, trailer, settings, wire: what several processes must see alike."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from xllm_hier import calls, figures, plans, request_messages, wire
from xllm_hier.block import BlockLayout, BlockType, RestoreRule, TensorSpec, common_boundary
from xllm_hier.config import EngineConfig
from xllm_hier.environment import check_environment
from xllm_hier.errors import ConfigError, WireError
from xllm_hier.hashing import block_hash, decode_tag, prompt_hashes, root_hash
from xllm_hier.ints import ints
from xllm_hier.store_key import draft_component, group_id, key_prefix, name_space_regex
from xllm_hier.worker.tiers.proof import Trailer

# --------------------------------------------------------------------------------------------- hashes


def test_hashes_are_the_same_in_every_process_whatever_its_hash_seed() -> None:
    code = "from xllm_hier.hashing import *; print([h.hex() for h in prompt_hashes(range(8), 4, root_hash('s'))])"
    answers = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("0", "1")
    }
    here = str([h.hex() for h in prompt_hashes(range(8), 4, root_hash("s"))])
    assert {answer.strip() for answer in answers} == {here}


def test_golden_hashes() -> None:
    assert root_hash().hex() == "543bf828e527c1e18978859cc12175b1"
    assert [h.hex() for h in prompt_hashes(range(8), 4, root_hash())] == [
        "368900d3d594a73e6a226cd25927cac7",
        "f40cdb82a5e3def5cc6ecaf91f51f237",
    ]
    assert [h.hex() for h in prompt_hashes(range(4), 4, root_hash("tenant"))] == ["dc34fb5dcc9a246045d1fc3b7816481a"]


def test_a_hash_depends_on_tokens_order_length_parent_salt_and_path() -> None:
    root = root_hash()
    kinds = [
        block_hash(root, [1, 2, 3, 4]),
        block_hash(root, [1, 2, 4, 3]),
        block_hash(root, [1, 2, 3]),
        block_hash(root, [1, 2, 3, 3]),
        block_hash(block_hash(root, [1, 2, 3, 4]), [1, 2, 3, 4]),
        block_hash(root_hash("tenant"), [1, 2, 3, 4]),
        block_hash(root_hash("", [b"adapter"]), [1, 2, 3, 4]),
        block_hash(root, [1, 2, 3, 4], decode_tag(2)),
        block_hash(root, [1, 2, 3, 4], decode_tag(3)),
    ]
    assert len(set(kinds)) == len(kinds)


def test_parts_of_the_root_cannot_run_into_each_other() -> None:
    assert root_hash("ab", [b"c"]) != root_hash("a", [b"bc"])
    assert root_hash("", [b"a", b"b"]) != root_hash("", [b"ab"])


def test_a_short_tail_has_no_hash_and_a_longer_prompt_keeps_the_first_ones() -> None:
    root = root_hash()
    assert len(prompt_hashes(range(9), 4, root)) == 2
    assert prompt_hashes(range(12), 4, root)[:2] == prompt_hashes(range(9), 4, root)


# ----------------------------------------------------------------------------------------------- keys


def layout(**changes: object) -> BlockLayout:
    tensors = (TensorSpec("key", "bfloat16", (32, 2, 64)), TensorSpec("value", "bfloat16", (32, 2, 64)))
    return dataclasses.replace(BlockLayout(BlockType.KV, 32, (0, 1, 2), tensors), **changes)  # type: ignore[arg-type]


def key(**changes: object) -> str:
    fields: dict = dict(
        model_id="m", key_component="main", block_type=BlockType.KV, schema_hash="0" * 32, tp_size=2, tp_rank=0
    )
    return key_prefix(**{**fields, **changes}) + "ab" * 16


def test_golden_key() -> None:
    assert key() == "xllm-kv-v3:1.m:4.main:2:KV:0:" + "0" * 32 + ":" + "ab" * 16
    assert key(mla=True) == "xllm-kv-v3:1.m:4.main:mla:KV:" + "0" * 32 + ":" + "ab" * 16


def test_any_field_that_changes_the_kv_changes_the_key() -> None:
    keys = [
        key(),
        key(model_id="n"),
        key(key_component="spec_draft::mtp::embedded"),
        key(schema_hash="1" * 32),
        key(tp_size=4),
        key(tp_rank=1),
        key(mla=True),
    ]
    assert len(set(keys)) == len(keys)


def test_mla_keys_carry_no_topology() -> None:
    assert key(mla=True, tp_size=1, tp_rank=0) == key(mla=True, tp_size=8, tp_rank=7)


def test_names_with_separators_cannot_make_two_keys_equal() -> None:
    texts = ["a", "a:1.b", "1.a", "a b", "a%20b", "ä", "", "main", "a:", ":a"]
    keys = {key(model_id=model, key_component=part) for model, part in itertools.product(texts, texts)}
    assert len(keys) == len(texts) ** 2
    assert all(text.isascii() and text.isprintable() and " " not in text for text in keys)


def test_the_name_space_regex_finds_one_model_only() -> None:
    import re

    for model in ("m.1", "m+1", "a(b)"):
        assert re.match(name_space_regex(model), key(model_id=model))
    assert not re.match(name_space_regex("m.1"), key(model_id="mx1"))
    assert not re.match(name_space_regex("m"), key(model_id="m2"))


def test_a_draft_is_known_by_algorithm_and_real_path(tmp_path: Path) -> None:
    assert draft_component("mtp") == "spec_draft::mtp::embedded"
    one = draft_component("draft_model", str(tmp_path / "d"))
    assert one == draft_component("draft_model", str(tmp_path / "x" / ".." / "d"))
    assert one != draft_component("draft_model", str(tmp_path / "other" / "d"))
    assert one.startswith("spec_draft::draft_model::d::")


def test_the_objects_of_one_logical_block_share_a_group_and_different_blocks_do_not() -> None:
    groups = {group_id("m", BlockType.KV, bytes([n]) * 16) for n in range(3)}
    assert len(groups) == 3


# --------------------------------------------------------------------------------- layout, trailer, rule


def test_the_schema_hash_changes_with_shape_dtype_role_and_layers_only() -> None:
    key_spec, value_spec = layout().tensors
    kinds = [
        layout(),
        layout(layers=(0, 1)),
        layout(tensors=(key_spec,)),
        layout(tensors=(value_spec, key_spec)),
        layout(tensors=(dataclasses.replace(key_spec, dtype="float16"), value_spec)),
        layout(tensors=(dataclasses.replace(key_spec, shape=(16, 2, 64)), value_spec)),
    ]
    assert len({kind.schema_hash for kind in kinds}) == len(kinds)
    assert layout().schema_hash == layout().schema_hash


def test_a_trailer_proves_its_block_and_nothing_else() -> None:
    raw = Trailer.pack(b"h" * 16, "0" * 32, b"s" * 8, 100)
    assert len(raw) == 64 and Trailer.mismatch(raw, b"h" * 16, "0" * 32, b"s" * 8, 100) is None
    assert Trailer.mismatch(raw, b"g" * 16, "0" * 32, b"s" * 8, 100) == "block_hash"
    assert Trailer.mismatch(raw, b"h" * 16, "1" * 32, b"s" * 8, 100) == "schema_hash"
    assert Trailer.mismatch(raw, b"h" * 16, "0" * 32, b"t" * 8, 100) == "checksum"
    assert Trailer.mismatch(raw, b"h" * 16, "0" * 32, b"s" * 8, 99) == "payload_bytes"
    assert Trailer.mismatch(raw, b"h" * 16, "0" * 32, b"s" * 8, 100, origin=7) == "origin"
    assert Trailer.mismatch(bytes(64), b"h" * 16, "0" * 32, b"s" * 8, 100) == "magic"


def test_objects_hold_payload_and_trailer_at_multiples_of_64_bytes() -> None:
    odd = layout(tensors=(TensorSpec("key", "bfloat16", (3, 1, 5)),), layers=(0,))
    assert odd.payload_bytes == 30 and odd.object_bytes == 128
    assert layout().object_bytes == layout().payload_bytes + 64


Present = dict[BlockType, tuple[bool, ...]]


def restores_at(boundary: int, rules: list[RestoreRule], present: Present) -> bool:
    """Token by token: is everything there that a row behind `boundary` may look at?"""
    for rule in rules:
        first = max(0, boundary - rule.span) if rule.span else 0
        for token in range(first, boundary):
            if boundary % rule.block_size or not present[rule.block_type][token // rule.block_size]:
                return False
    return True


def brute_force(rules: list[RestoreRule], present: Present, limit: int) -> int:
    return max(boundary for boundary in range(limit + 1) if restores_at(boundary, rules, present))


def boundary_of(rules: list[RestoreRule], present: Present, limit: int) -> int:
    return common_boundary(rules, lambda kind, index: present[kind][index], limit)


def test_the_restore_rule_of_kv_equals_a_brute_force_search() -> None:
    rules = [RestoreRule(BlockType.KV, 4)]
    for size in range(7):
        for have in itertools.product([False, True], repeat=size):
            present = {BlockType.KV: have}
            assert boundary_of(rules, present, 4 * size) == brute_force(rules, present, 4 * size)


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 9, 30])
@pytest.mark.parametrize("others", [(), (BlockType.KV,), (BlockType.KV, BlockType.LINEAR)])
def test_the_boundary_of_several_types_equals_a_brute_force_search(window: int, others: tuple[BlockType, ...]) -> None:
    spans = {BlockType.KV: 0, BlockType.LINEAR: 1}
    rules = [RestoreRule(kind, 4, spans[kind]) for kind in others] + [RestoreRule(BlockType.SWA, 4, window)]
    for have in itertools.product([False, True], repeat=4 * len(rules)):
        present = {rule.block_type: have[4 * i : 4 * i + 4] for i, rule in enumerate(rules)}
        for limit in (16, 13):
            assert boundary_of(rules, present, limit) == brute_force(rules, present, limit)


def test_types_of_different_block_sizes_meet_where_all_their_blocks_end() -> None:
    rules = [RestoreRule(BlockType.KV, 6), RestoreRule(BlockType.SWA, 4, 5)]
    for have in itertools.product([False, True], repeat=4 + 6):
        present = {BlockType.KV: have[:4], BlockType.SWA: have[4:]}
        assert boundary_of(rules, present, 24) == brute_force(rules, present, 24)


def test_a_block_knows_the_boundaries_that_need_it() -> None:
    for size, span in itertools.product((1, 4, 5), (1, 3, 4, 5, 8, 9, 30)):
        rule = RestoreRule(BlockType.SWA, size, span)
        for index in range(12):
            assert list(rule.needed_at(index)) == [b for b in range(50) if index in rule.needed(b * size)]


def test_what_a_restore_needs_is_asked_for_from_the_top() -> None:
    """Where a long prefix is whole, nothing below the window is looked at."""
    asked = []

    def has(kind: BlockType, index: int) -> bool:
        asked.append(index)
        return True

    assert common_boundary([RestoreRule(BlockType.SWA, 4, 8)], has, 400) == 400
    assert sorted(asked) == [98, 99]


# ----------------------------------------------------------------------------------------------- wire


def test_every_message_survives_the_wire() -> None:
    spec = request_messages.SamplingSpec(0.5, 1, 0.9, 0.1, 7, 2)
    logprob = request_messages.TokenLogprob(1, -0.5, 1, [1, 2], [-0.5, -1.0])
    draft = figures.DraftDetails("d", ["KV"], needs_hidden=False)
    mapping = plans.BlockMapping("KV", ints([1]), ints([2]), b"h" * 16)
    messages = [
        request_messages.AddRequest("r", ints([1, 2]), spec, 3, stop_token_ids=[4]),
        request_messages.StepOutputs(
            [request_messages.RequestOutput("r", [1], [logprob], usage=request_messages.PromptUsage(1, 2, 3, 4))]
        ),
        plans.TransferBlocks(1, [mapping]),
        plans.TransferKvBlocks(2, [mapping], put=False),
        plans.Forward(
            1,
            [2],
            [plans.SequenceRows(0, ints([1]), ints([0]), 0, spec)],
            [plans.SequenceRows(3, ints([1]), ints([0, 1]), 0, spec, 2)],
        ),
        plans.ForwardOutput(1, 0, ints([5]), [logprob, None], [[logprob]], [], 0.1, 0.0),
        calls.Call(1, calls.ClearCache(["host"])),
        calls.CallResult(1, figures.EngineStats(pd=figures.PairStats("DECODE", "a", {"b": "linked"}, 0.5))),
        calls.WorkerCall(1, calls.SwitchStore(None)),
        figures.WorkerReady(0, [figures.TypeSizes("KV", 0, 1, 2, 3)], 16, 64, 100, draft=draft),
    ]
    for message in messages:
        again = wire.unpack(wire.pack(message))
        assert repr(again) == repr(message)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xc1", "broken msgpack"),
        (b"", "broken msgpack"),
        (b"\x91\xa3abc", "unknown message 'abc'"),
        (b"\x91\xacAbortRequest", "AbortRequest has 1 fields, 0 came"),
        (b"\x01", "a message is a list"),
        (b"\xc7\x03\x01abc", "int32 array of 3 bytes"),
        (b"\xc7\x01\x09a", "unknown extension type 9"),
    ],
)
def test_a_message_that_does_not_decode_is_a_named_error(data: bytes, words: str) -> None:
    with pytest.raises(WireError, match=words):
        wire.unpack(data)


def test_random_bytes_never_raise_anything_but_a_wire_error() -> None:
    dice = random.Random(0)
    good = wire.pack(request_messages.AddRequest("r", ints([1, 2]), request_messages.SamplingSpec(), 3))
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(dice.randrange(1, 4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        with contextlib.suppress(WireError):
            wire.unpack(bytes(data[: dice.randrange(1, len(data) + 1)]))


def test_only_messages_can_be_sent() -> None:
    with pytest.raises(WireError, match="dict is not a message"):
        wire.pack({})
    with pytest.raises(WireError, match="object cannot travel"):
        wire.pack(calls.Call(1, calls.ClearCache([object()])))  # type: ignore[list-item]


# ------------------------------------------------------------------------------------------- settings


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("flags", "name", "allowed"),
    [
        (["--no-such-flag=1"], "no_such_flag", "--help"),
        (["--host_blocks_factor=much"], "host_blocks_factor", "a number of at least 0"),
        (["--dtype=int4"], "dtype", "auto | float32 | bfloat16 | float16"),
        (["--max_seqs_per_batch=0"], "max_seqs_per_batch", "an integer of at least 1"),
        (["--enable_prefix_cache=perhaps"], "enable_prefix_cache", "true | false"),
        (["--enable_kvcache_store", "--host_blocks_factor=1"], "host_blocks_factor", "above 1.0"),
        (
            ["--enable_kvcache_store", "--host_blocks_factor=4", "--no-enable-prefix-cache"],
            "enable_kvcache_store",
            "enable_prefix_cache=true",
        ),
        (
            ["--enable_kvcache_store", "--host_blocks_factor=4", "--store_master_server_address=nowhere"],
            "store_master_server_address",
            "host:port or etcd://",
        ),
        (["--store_protocol=udp"], "store_protocol", "tcp | rdma | ascend"),
        (["--tp_size=0"], "tp_size", "an integer from 1 to 1024"),
        (["--port=70000"], "port", "from 0 to 65535"),
        (["--block_size=32", "--prefill_tile_rows=100"], "prefill_tile_rows", "multiple of block_size 32"),
    ],
)
def test_a_bad_setting_names_itself_its_value_and_what_is_allowed(flags: list[str], name: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_sources(flags, environ={})
    assert caught.value.name == name and allowed in str(caught.value)
    assert f"--{name}=" in str(caught.value)


def test_the_command_line_outranks_the_environment_and_that_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("port: 1\nblock_size: 16\nmodel_id: from-file\n")
    environ = {"XLLM_PORT": "2", "XLLM_BLOCK_SIZE": "64"}
    config = EngineConfig.from_sources(["--config", str(file), "--port=3"], environ)
    assert (config.port, config.block_size, config.model_id) == (3, 64, "from-file")


def test_a_config_file_with_an_unknown_name_is_refused_by_that_name(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"block_sise": 16}))
    with pytest.raises(ConfigError, match="block_sise"):
        EngineConfig.from_sources(["--config", str(file)], {})


def test_sizes_take_units_and_flags_take_dashes() -> None:
    config = EngineConfig.from_sources(["--store-segment-size", "2GB", "--max-cache-size=64MiB"], {})
    assert (config.store_segment_size, config.max_cache_size) == (2 << 30, 64 << 20)


def test_python_settings_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="block_size"):
        EngineConfig(block_size="32")  # type: ignore[arg-type]


def test_the_model_folder_must_be_one(tmp_path: Path, model: str) -> None:
    with pytest.raises(ConfigError, match="model"):
        check_environment(EngineConfig(model=str(tmp_path / "none"), port=0))
    check_environment(EngineConfig(model=model, port=0))
    (Path(model) / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="safetensors"):
        check_environment(EngineConfig(model=model, port=0))


def test_a_port_range_that_is_taken_is_named(model: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port='127.0.0.1:{port}'"):
            check_environment(EngineConfig(model=model, port=port))
        config = EngineConfig(
            model=model,
            port=0,
            enable_kvcache_store=True,
            host_blocks_factor=2.0,
            store_master_server_address="127.0.0.1:1",
            store_local_hostname=f"127.0.0.1:{port}",
        )
        with pytest.raises(ConfigError, match="store_local_hostname"):
            check_environment(config)


def test_a_device_the_machine_cannot_have_is_refused_before_any_process_starts(model: str) -> None:
    with pytest.raises(ConfigError, match=r"device='npu'.*torch_npu"):
        check_environment(EngineConfig(model=model, port=0, device="npu"))


@pytest.mark.skipif(Path("/sys/class/infiniband").is_dir(), reason="this machine may have RDMA")
def test_rdma_without_hardware_is_refused_and_never_becomes_tcp(model: str) -> None:
    config = EngineConfig(
        model=model,
        port=0,
        enable_kvcache_store=True,
        host_blocks_factor=2.0,
        store_protocol="rdma",
        store_master_server_address="127.0.0.1:1",
    )
    with pytest.raises(ConfigError, match="store_protocol='rdma'"):
        check_environment(config)


def test_help_groups_every_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        EngineConfig.from_sources(["--help"], {})
    text = capsys.readouterr().out
    for item in dataclasses.fields(EngineConfig):
        assert f"--{item.name}" in text
    assert "default: 30000" in text and "cache tiers:" in text
