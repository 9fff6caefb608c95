"""Every setting once: type, unit, default, help and check; command line, config file, environment all come from here.

Names are xLLM's. A value that cannot be used is a ConfigError with the setting's name, its value and the allowed ones,
before any process starts. `environment.py` checks the settings against the machine.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from .errors import ConfigError
from .machine import check_address, check_secret, etcd_endpoints
from .settings import check_value, read_sources, setting

MODEL, CACHE, STORE, ENGINE, DISAGG, CLUSTER, SERVER, LIMITS = (
    "model",
    "cache tiers",
    "store (tier 3)",
    "scheduling and execution",
    "prefill and decode on separate instances",
    "cluster",
    "server",
    "time limits",
)
GIB = 1 << 30
_LEAST_DISK = 16 << 20
TRANSFER_PORTS = 8  # for each worker: its Transfer Engine takes two of a range, a direct store client two each time


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All settings of one instance; immutable, checked when made.

    Raises:
        ConfigError: a value is out of its range, or two settings contradict each other.
    """

    model: str = setting("", MODEL, "Hugging Face model folder (config.json, *.safetensors); empty = the demo model")
    model_id: str = setting("", MODEL, "name space of the store keys; empty = last part of the model path")
    tokenizer: str = setting("", MODEL, "folder of the tokenizer; empty = the model folder")
    dtype: str = setting("auto", MODEL, "of weights and KV", choices=("auto", "float32", "bfloat16", "float16"))
    device: str = setting("auto", MODEL, "where the model runs", choices=("auto", "cpu", "cuda", "npu"))
    model_impl: str = setting(
        "auto",
        MODEL,
        "own = our decoder layer, hf = transformers' modelling code with our attention, auto = own where it exists",
        choices=("auto", "own", "hf"),
    )
    tp_size: int = setting(
        1, MODEL, "tensor parallel workers, one device each (on cpu they share the cores)", low=1, high=1024
    )
    max_model_len: int = setting(0, MODEL, "longest prompt plus output; 0 = the model's", unit="tokens", low=0)

    enable_prefix_cache: bool = setting(True, CACHE, "reuse KV of equal prefixes")
    block_size: int = setting(
        0, CACHE, "tokens per block; 0 = 32 on cpu, 128 on npu, 256 on cuda", unit="tokens", low=0
    )
    max_cache_size: int = setting(0, CACHE, "device cache of each worker; 0 = from free memory", unit="bytes", low=0)
    max_memory_utilization: float = setting(
        0.8,
        CACHE,
        "share of free memory that all caches together may take when max_cache_size is 0",
        low=0.01,
        high=0.99,
    )
    cache_layout: str = setting(
        "auto",
        CACHE,
        "auto = layers with a sliding window have blocks of their own, of which a sequence keeps its window; flat = "
        "all attention layers share one kind of block",
        choices=("auto", "flat"),
    )
    swa_blocks_factor: float = setting(
        0.5, CACHE, "blocks of sliding-window layers = factor x those of full attention", low=0.0, high=1.0
    )
    swa_checkpoint_stride: int = setting(
        0,
        CACHE,
        "of sliding-window layers the window before each multiple of so many tokens goes to host and store, beside "
        "that before the prompt's end; 0 = four windows",
        unit="tokens",
        low=0,
    )
    linear_checkpoint_stride: int = setting(
        0,
        CACHE,
        "of recurrent layers the state behind each multiple of so many tokens is kept, beside that behind the prompt's "
        "last block; 0 = 1024",
        unit="tokens",
        low=0,
    )
    linear_checkpoints_factor: float = setting(
        1.0,
        CACHE,
        "checkpoints of recurrent layers on the device for each linear_checkpoint_stride of tokens that it has blocks "
        "for",
        low=0.0,
    )
    host_blocks_factor: float = setting(
        0.0, CACHE, "host blocks = factor x device blocks; the host cache exists only above 1.0", low=0.0
    )
    host_huge_pages: bool = setting(
        False, CACHE, "ask for reserved 2 MiB pages for own host memory; falls back to small ones and says so"
    )
    layers_wise_copy_batchs: int = setting(
        4,
        CACHE,
        "layer groups of a layered copy (layers per group = max(1, layers // n)); 0 = all layers in one",
        low=0,
    )
    copy_backend: str = setting(
        "auto",
        CACHE,
        "copies between host and device: native = the C++ extension, torch = plain torch, auto = native where built",
        choices=("auto", "native", "torch"),
    )
    copy_threads: int = setting(1, CACHE, "threads of the native copier on cpu, beside those of torch", low=1, high=64)
    restore_policy: str = setting(
        "measured",
        CACHE,
        "measured = blocks that would take longer to restore than to compute, by the rates so far, are computed; "
        "always = whatever can be restored is",
        choices=("measured", "always"),
    )
    verify_host_blocks: bool = setting(
        True,
        CACHE,
        "check the sum of each host block beside its copy to the device; a block that does not fit is recomputed",
    )
    audit_rate: int = setting(
        0,
        CACHE,
        "compute the restored prefix of 1 in N requests again, in idle time, and compare; a difference is an alarm and "
        "ends all restoring; 0 = no audit",
        low=0,
    )
    decode_kv_reuse: str = setting(
        "canonical",
        CACHE,
        "blocks completed by decode: canonical = recomputed once by a prefill tile before they are published (same "
        "bits), as_is = published as they are (equal up to rounding), off = not published",
        choices=("canonical", "as_is", "off"),
    )

    enable_kvcache_store: bool = setting(False, STORE, "use Mooncake Store as third tier")
    store_protocol: str = setting(
        "tcp", STORE, "a failure of rdma is an error, never tcp", choices=("tcp", "rdma", "ascend")
    )
    store_rdma_devices: str = setting("", STORE, "comma list of HCAs; empty = Mooncake finds them")
    store_master_server_address: str = setting(
        "",
        STORE,
        "host:port, or etcd://host:port;host:port to follow the leader of an HA cluster; empty = embedded store",
    )
    store_client_address: str = setting(
        "",
        STORE,
        "host:port of this node's mooncake_client: workers use it through shared memory; empty = direct client",
    )
    store_metadata_server: str = setting("P2PHANDSHAKE", STORE, "metadata of the Transfer Engine")
    store_local_hostname: str = setting(
        "127.0.0.1:12345",
        STORE,
        "base endpoint of direct clients; worker r takes port + r, the whole range must be free",
    )
    store_segment_size: int = setting(4 * GIB, STORE, "memory of the embedded store", unit="bytes", low=16 << 20)
    embedded_store_dir: str = setting(
        "",
        STORE,
        "folder in which the embedded store keeps its objects on disk, so that they survive a restart of everything; "
        "empty = memory only",
    )
    embedded_store_disk_size: int = setting(
        0,
        STORE,
        "of embedded_store_dir at most, what was not read for longest goes first; 0 = nine tenths of the disk",
        unit="bytes",
        low=0,
    )
    prefetch_batch_size: int = setting(8, STORE, "logical blocks per prefetch batch", unit="blocks", low=1)
    prefetch_timeout: int = setting(
        30000,
        STORE,
        "after it no new prefetch batch is issued; batches in flight are awaited; 0 = for ever",
        unit="ms",
        low=0,
    )
    store_call_limit_ms: int = setting(
        5000,
        STORE,
        "a store call that takes longer counts as failed, and the store is left alone until a probe works",
        unit="ms",
        low=1,
    )
    prefetch_deadline_ms: int = setting(
        0,
        STORE,
        "after it a request waits for no store read any more; the targets of its reads stay untouched until these have "
        "ended; 0 = no deadline",
        unit="ms",
        low=0,
    )

    max_tokens_per_batch: int = setting(1024, ENGINE, "token budget of one step", unit="tokens", low=1)
    max_seqs_per_batch: int = setting(64, ENGINE, "sequences of one step", low=1)
    max_tokens_per_chunk_for_prefill: int = setting(
        0, ENGINE, "longest prefill chunk of one sequence in one step; 0 = the step's budget", unit="tokens", low=0
    )
    max_waiting_requests: int = setting(1024, ENGINE, "more open requests than this are refused with HTTP 429", low=1)
    batch_invariant: bool = setting(
        True, ENGINE, "same bits whatever the batch, the chunking and the cache hits; false = for the last per cent"
    )
    num_speculative_tokens: int = setting(
        0, ENGINE, "draft tokens verified per step and sequence; 0 = no speculation", unit="tokens", low=0, high=31
    )
    speculative_algorithm: str = setting(
        "mtp",
        ENGINE,
        "where drafts come from: ngram = what followed the last tokens where they stood before, draft_model = a "
        "smaller model, mtp = the checkpoint's own multi-token prediction head",
        choices=("ngram", "draft_model", "mtp"),
    )
    draft_model: str = setting("", ENGINE, "folder of the draft model; its tokenizer must be the model's")
    prefill_tile_rows: int = setting(
        0,
        ENGINE,
        "rows of one prefill tile; 0 = 256 with a smaller tail tile where a check at load finds equal bits",
        low=0,
    )
    cpu_kernels: str = setting(
        "auto",
        ENGINE,
        "products and attention on cpu: native = the C++ extension, with the same bits for a row in any batch, chunk "
        "and number of threads; torch = torch's in tiles of fixed rows; auto = native where it is built, the machine "
        "has AVX2 and a check at load finds equal bits",
        choices=("auto", "native", "torch"),
    )
    num_threads: int = setting(0, ENGINE, "torch threads of a worker on cpu; 0 = all cores", low=0)

    enable_disagg_pd: bool = setting(
        False, DISAGG, "this instance is one half of a pair: it computes prompts, or it generates behind them"
    )
    instance_role: str = setting(
        "DEFAULT",
        DISAGG,
        "PREFILL = takes requests, computes their prompts and hands them over; DECODE = generates for PREFILL "
        "instances; DEFAULT = both, alone",
        choices=("DEFAULT", "PREFILL", "DECODE"),
    )
    kv_cache_transfer_mode: str = setting(
        "PUSH",
        DISAGG,
        "PUSH = the prefill instance writes blocks layer by layer while it computes, PULL = the decode instance reads "
        "them afterwards; the same on both sides",
        choices=("PUSH", "PULL"),
    )
    decode_instances: str = setting(
        "",
        DISAGG,
        "comma list of host:port of the DECODE instances (their disagg_pd_port) a PREFILL instance hands to; with "
        "etcd_addr it may be empty: the registry tells which there are",
    )
    disagg_pd_host: str = setting(
        "127.0.0.1",
        DISAGG,
        "address of this machine that peers reach: control and transfers listen there, without authentication",
    )
    disagg_pd_port: int = setting(
        7777, DISAGG, "port of the control between instances; 0 = a free one, printed at start", low=0, high=65535
    )
    transfer_listen_port: int = setting(
        26000,
        DISAGG,
        "base port of the transfers; worker r takes two of the eight from port + 8 r on, at all addresses; 0 = any",
        low=0,
        high=65535,
    )
    transfer_protocol: str = setting(
        "tcp", DISAGG, "of the transfers; a failure of rdma is an error, never tcp", choices=("tcp", "rdma", "ascend")
    )
    heart_beat_interval: float = setting(
        0.5, DISAGG, "between two signs of life of an instance to its peers and to the service", unit="s", low=0.05
    )

    etcd_addr: str = setting(
        "",
        CLUSTER,
        "host:port of etcd, several separated by ;: the instance registers there and is found by the service; user and "
        "password come from ETCD_USERNAME and ETCD_PASSWORD; empty = it stands alone",
    )
    etcd_namespace: str = setting("", CLUSTER, "prefix of all keys in etcd: clusters that must not see each other")
    etcd_ttl: int = setting(3, CLUSTER, "of the registration, after which a dead instance is gone", unit="s", low=1)
    advertise_host: str = setting(
        "", CLUSTER, "address under which service and peers reach this instance; empty = host"
    )
    enable_kv_events: bool = setting(
        False, CLUSTER, "publish which blocks the caches have, for routers; always with etcd_addr"
    )
    kv_events_port: int = setting(
        0,
        CLUSTER,
        "port where cache events are published, as vLLM's, without authentication; 0 = a free one",
        low=0,
        high=65535,
    )
    kv_events_replay_port: int = setting(
        0, CLUSTER, "port that repeats missed events; 0 = a free one", low=0, high=65535
    )

    host: str = setting("127.0.0.1", SERVER, "address of the HTTP server")
    port: int = setting(8010, SERVER, "port of the HTTP server; 0 = a free one, printed at start", low=0, high=65535)
    served_model_name: str = setting("", SERVER, "name in the API; empty = model_id")
    api_key: str = setting(
        "",
        SERVER,
        "bearer token that /v1/* asks for; empty = anybody who reaches the port may use it (see XLLM_API_KEY)",
    )
    admin_token: str = setting("", SERVER, "bearer token of /cache/*; empty = only loopback may call them")
    log_level: str = setting("info", SERVER, "of all processes", choices=("debug", "info", "warning", "error"))
    log_requests: bool = setting(False, SERVER, "log each HTTP request")
    check_invariants: bool = setting(False, SERVER, "check the block books whenever the engine idles (debugging)")

    startup_timeout_s: float = setting(600.0, LIMITS, "for all processes to come up", unit="s", low=1)
    worker_timeout_s: float = setting(
        300.0, LIMITS, "for one answer of a worker, before the instance counts it as hung", unit="s", low=1
    )
    restart_on_failure: bool = setting(
        False,
        LIMITS,
        "bring a served instance up again after one of its processes died or hung; its store, also the embedded one, "
        "keeps its objects",
    )
    peer_timeout_s: float = setting(
        10.0, LIMITS, "without a sign of life of a PD peer, before it counts as lost", unit="s", low=0.5
    )
    peer_wait_s: float = setting(
        60.0, LIMITS, "of a request for a decode instance that takes it, before it fails with HTTP 503", unit="s", low=0
    )
    peer_late_writes_s: float = setting(
        0.0,
        LIMITS,
        "for which a decode instance keeps blocks that a lost prefill instance may still be writing to; 0: the longer "
        "of 15 and peer_timeout_s + 10. A write that comes later spoils blocks of other requests",
        unit="s",
        low=0,
    )
    drain_timeout_s: float = setting(30.0, LIMITS, "for open requests after SIGTERM", unit="s", low=0)

    def __post_init__(self) -> None:
        hints = get_type_hints(EngineConfig)
        for item in dataclasses.fields(self):
            check_value(item, hints[item.name], getattr(self, item.name))
        self._check_together()

    def _check_together(self) -> None:
        if self.enable_kvcache_store and not self.enable_prefix_cache:
            raise ConfigError("enable_kvcache_store", True, "only with --enable_prefix_cache=true")
        if self.enable_kvcache_store and self.host_blocks_factor <= 1.0:
            raise ConfigError(
                "host_blocks_factor", self.host_blocks_factor, "above 1.0 with --enable_kvcache_store=true"
            )
        self._check_speculation()
        for name in ("swa_checkpoint_stride", "linear_checkpoint_stride"):
            if self.block_size and getattr(self, name) % self.block_size:
                raise ConfigError(name, getattr(self, name), f"a multiple of block_size {self.block_size}")
        if self.block_size and self.prefill_tile_rows % self.block_size:
            raise ConfigError(
                "prefill_tile_rows", self.prefill_tile_rows, f"a multiple of block_size {self.block_size}"
            )
        self._check_disagg()
        self._check_cluster()
        for name in ("api_key", "admin_token"):
            check_secret(name, getattr(self, name))
        self._check_embedded_store()
        if self.enable_kvcache_store:
            check_address("store_local_hostname", self.store_local_hostname)
            if self.store_client_address:
                check_address("store_client_address", self.store_client_address)
            self._check_master()

    def _check_speculation(self) -> None:
        if self.draft_model and not (self.num_speculative_tokens and self.speculative_algorithm == "draft_model"):
            raise ConfigError(
                "draft_model",
                self.draft_model,
                "only with --speculative_algorithm=draft_model and --num_speculative_tokens of at least 1",
            )
        if self.num_speculative_tokens and self.speculative_algorithm == "draft_model" and not self.draft_model:
            raise ConfigError("draft_model", "", "a folder, as --speculative_algorithm=draft_model needs one")

    def _check_disagg(self) -> None:
        role = self.instance_role
        if self.enable_disagg_pd and role == "DEFAULT":
            raise ConfigError("instance_role", role, "PREFILL | DECODE with --enable_disagg_pd=true")
        if not self.enable_disagg_pd and role != "DEFAULT":
            raise ConfigError("instance_role", role, "DEFAULT without --enable_disagg_pd=true")
        if self.decode_instances and role != "PREFILL":
            raise ConfigError("decode_instances", self.decode_instances, "empty unless --instance_role=PREFILL")
        for address in self.decode_addresses:
            check_address("decode_instances", address, "a comma list of host:port")
        if len(set(self.decode_addresses)) < len(self.decode_addresses):
            raise ConfigError("decode_instances", self.decode_instances, "each instance once")
        if role == "PREFILL" and not self.decode_instances and not self.etcd_addr:
            allowed = "at least one host:port with --instance_role=PREFILL and without --etcd_addr"
            raise ConfigError("decode_instances", "", allowed)
        first, last = self.transfer_listen_port, self.transfer_listen_port + TRANSFER_PORTS * self.tp_size - 1
        if self.enable_disagg_pd and first and (last > 65535 or (last >= 32768 and first <= 60999)):
            allowed = f"0, or a port from which {last - first + 1} lie outside of 32768 to 60999 and below 65536"
            raise ConfigError("transfer_listen_port", first, allowed)
        if self.peer_timeout_s < 2 * self.heart_beat_interval:
            raise ConfigError("peer_timeout_s", self.peer_timeout_s, "at least two heart_beat_interval")

    def _check_cluster(self) -> None:
        if self.etcd_addr:
            etcd_endpoints(self.etcd_addr)
        if self.etcd_addr and self.reachable_host in ("0.0.0.0", "::", ""):
            allowed = f"an address that others reach, as --host={self.host} is none"
            raise ConfigError("advertise_host", self.advertise_host, allowed)
        if self.kv_events_port and self.kv_events_port == self.kv_events_replay_port:
            raise ConfigError("kv_events_replay_port", self.kv_events_port, "another port than kv_events_port, or 0")

    def _check_embedded_store(self) -> None:
        if self.embedded_store_dir and not self.embedded_store:
            allowed = "empty unless --enable_kvcache_store=true without --store_master_server_address"
            raise ConfigError("embedded_store_dir", self.embedded_store_dir, allowed)
        nbytes = self.embedded_store_disk_size
        if nbytes and not (self.embedded_store_dir and nbytes >= _LEAST_DISK):
            allowed = f"0, or at least {_LEAST_DISK} with --embedded_store_dir"
            raise ConfigError("embedded_store_disk_size", nbytes, allowed)

    def _check_master(self) -> None:
        address = self.store_master_server_address
        if not address:
            if self.store_client_address:
                raise ConfigError(
                    "store_client_address", self.store_client_address, "only with a store_master_server_address"
                )
            if self.store_protocol != "tcp":
                raise ConfigError(
                    "store_protocol", self.store_protocol, "tcp for the embedded store (give a master's address)"
                )
            return
        parts = address.removeprefix("etcd://").split(";") if address.startswith("etcd://") else [address]
        for part in parts:
            check_address("store_master_server_address", part, "host:port or etcd://host:port;host:port")

    # ------------------------------------------------------------------------------------------- derived

    @property
    def host_cache_enabled(self) -> bool:
        return self.enable_prefix_cache and self.host_blocks_factor > 1.0

    @property
    def drafts_by_model(self) -> bool:
        """Drafts come from a model that has caches of its own."""
        return self.num_speculative_tokens > 0 and self.speculative_algorithm != "ngram"

    @property
    def decode_addresses(self) -> list[str]:
        """The host:port of each decode instance that a prefill instance hands its requests to."""
        return [address.strip() for address in self.decode_instances.split(",") if address.strip()]

    @property
    def reachable_host(self) -> str:
        """The address under which others reach this instance."""
        return self.advertise_host or self.host

    @property
    def publishes_events(self) -> bool:
        return self.enable_kv_events or bool(self.etcd_addr)

    @property
    def embedded_store(self) -> bool:
        """The instance brings up its own master and segment."""
        return self.enable_kvcache_store and not self.store_master_server_address

    @property
    def name_space(self) -> str:
        return self.model_id or Path(self.model).resolve().name

    @property
    def api_model_name(self) -> str:
        return self.served_model_name or self.name_space

    @property
    def tokenizer_folder(self) -> Path:
        return Path(self.tokenizer or self.model)

    @property
    def chunk_tokens(self) -> int:
        """Longest prefill chunk of one sequence in one step."""
        return min(self.max_tokens_per_chunk_for_prefill or self.max_tokens_per_batch, self.max_tokens_per_batch)

    # ------------------------------------------------------------------------------------------- sources

    @classmethod
    def from_sources(
        cls,
        argv: Sequence[str],
        environ: Mapping[str, str] = os.environ,
        prog: str = "python -m xllm_hier.serve",
        overrides: Mapping[str, Any] | None = None,
    ) -> EngineConfig:
        """The configuration of a command line, the environment and an optional `--config` file.

        `overrides` are defaults of the caller that still yield to every source.

        Raises:
            ConfigError: unknown flag or name, or a value that does not parse.
            SystemExit: after `--help` (code 0).
        """
        return cls(**read_sources(cls, argv, environ, prog, overrides))
