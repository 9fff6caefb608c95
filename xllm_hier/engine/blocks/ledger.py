"""The books that all parts of the block management share: pools, rules, accounts. No plan is made here."""

from __future__ import annotations

from dataclasses import dataclass

from .account import PrefixAccount
from .checkpoints import Checkpoints
from .journal import CacheJournal
from .keeping import Keeping
from .policy import RestorePolicy
from .prefix import Prefix
from .settings import BookSettings
from .types import PoolSet


@dataclass(frozen=True)
class Ledger:
    """One instance's books.

    `checkpoints`: None without recurrent layers. `journal`, where there is one, is told of each block that can be had,
    or no more.
    """

    settings: BookSettings
    pools: PoolSet
    policy: RestorePolicy
    prefix: Prefix
    keeping: Keeping
    checkpoints: Checkpoints | None
    account: PrefixAccount
    journal: CacheJournal | None

    @classmethod
    def of(cls, pools: PoolSet, settings: BookSettings, policy: RestorePolicy, journal: CacheJournal | None) -> Ledger:
        """New books, in which nothing is cached."""
        if journal is not None:
            journal.watch(pools)
        keeping = Keeping(settings)
        checkpoints = Checkpoints(pools.linear, keeping) if pools.linear is not None else None
        prefix, account = Prefix(pools, settings, policy), PrefixAccount(settings.block_size)
        return cls(settings, pools, policy, prefix, keeping, checkpoints, account, journal)
