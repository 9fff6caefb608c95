"""Attention over a cache of latents: one row a token, key and value at once, for all heads of all ranks.

Multi-head Latent Attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1) makes a token's keys and values
from one latent; with the matrices that do so multiplied into query and output, only that latent and one rotated key are
cached, and attention runs over them as if they were the one KV head of all query heads::

    a row of the cache |<-------- latent -------->|<- rotated key ->|
    as key             |<------------------ all of it ------------->|
    as value           |<------------------ all of it ------------->|    the output's last columns mean nothing

Values keep the key's columns because the CPU's fast kernel wants both of one size: cut to the latent it is left, and
for a 512 + 64 row and 4,096 tokens a query tile takes 10 times, a single row 3.6 times as long.
"""

from __future__ import annotations

from .attention import PagedAttention


class LatentAttention(PagedAttention):
    """`PagedAttention` whose values are its keys; `head_dim` is the width of a latent row, `kv_heads` is 1.

    Caches are [num_blocks, 1, block_size, width] (with or without a dimension of the one head). The `v` of a call is
    not looked at. Queries and outputs are `width` wide.
    """

    kernel = "latent gather"
    tensors = 1
