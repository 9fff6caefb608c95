# shellcheck shell=bash
# To be sourced: the flags of an instance that uses a highly available Mooncake Store, as an array.
#   . scripts/kvcache_store/xllm_mooncake_ha_args.sh
#   python -m xllm_hier.serve --model /models/NAME "${XLLM_MOONCAKE_HA_ARGS[@]}"
# needs     MOONCAKE_ETCD_ENDPOINTS      host:port;host:port
#           XLLM_STORE_LOCAL_HOSTNAME    host:port of this node; worker r of a direct client takes port + r
# optional  MOONCAKE_CLUSTER_ID xllm-mooncake, XLLM_STORE_CLIENT_ADDRESS (host:port of this node's mooncake_client; empty =
#           direct client), XLLM_HOST_BLOCKS_FACTOR 4, XLLM_PREFETCH_BATCH_SIZE 8, XLLM_PREFETCH_TIMEOUT 30000
# Sets XLLM_MOONCAKE_HA_ARGS and exports MC_STORE_CLUSTER_ID. Returns 2 when a variable is missing or wrong.

_xllm_mooncake_ha_args() {
  local missing=() variable endpoint endpoints text
  for variable in MOONCAKE_ETCD_ENDPOINTS XLLM_STORE_LOCAL_HOSTNAME; do
    [ -n "${!variable:-}" ] || missing+=("$variable")
  done
  if [ ${#missing[@]} -gt 0 ]; then
    printf 'xllm_mooncake_ha_args.sh: set %s\n' "${missing[*]}" >&2
    return 2
  fi
  text=${MOONCAKE_ETCD_ENDPOINTS#etcd://}
  text=${text//http:\/\//}
  text=${text//,/;}
  text=${text// /}
  IFS=';' read -r -a endpoints <<<"$text"
  for endpoint in "${endpoints[@]}"; do
    if ! [[ $endpoint =~ ^[^:/]+:[0-9]+$ || $endpoint =~ ^\[[0-9a-fA-F:]+\]:[0-9]+$ ]]; then
      printf 'xllm_mooncake_ha_args.sh: MOONCAKE_ETCD_ENDPOINTS: %s is not host:port\n' "$endpoint" >&2
      return 2
    fi
  done
  export MC_STORE_CLUSTER_ID=${MOONCAKE_CLUSTER_ID:-xllm-mooncake}
  XLLM_MOONCAKE_HA_ARGS=(
    --enable_kvcache_store=true
    --store_master_server_address="etcd://$text"
    --store_local_hostname="$XLLM_STORE_LOCAL_HOSTNAME"
    --host_blocks_factor="${XLLM_HOST_BLOCKS_FACTOR:-4}"
    --prefetch_batch_size="${XLLM_PREFETCH_BATCH_SIZE:-8}"
    --prefetch_timeout="${XLLM_PREFETCH_TIMEOUT:-30000}"
  )
  if [ -n "${XLLM_STORE_CLIENT_ADDRESS:-}" ]; then
    XLLM_MOONCAKE_HA_ARGS+=(--store_client_address="$XLLM_STORE_CLIENT_ADDRESS")
  fi
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  echo 'xllm_mooncake_ha_args.sh is to be sourced: . xllm_mooncake_ha_args.sh' >&2
  exit 2
fi
_xllm_mooncake_ha_args
