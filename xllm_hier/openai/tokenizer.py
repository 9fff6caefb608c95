"""The model's tokenizer as the API needs it: text to ids, chats to ids, ids to text, and single tokens as bytes.

Only what transformers offers without torch is imported when the folder has a tokenizer.json.
"""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import ConfigError, RequestError

_LONG_TEXT = 2000  # characters; shorter texts are encoded faster than a thread is entered
_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer in `folder`; None when it has no tokenizer files at all (token-id prompts only).

    Raises:
        ConfigError: there are tokenizer files that do not load.
    """
    if not any((folder / name).is_file() for name in _FILES):
        return None
    try:
        return Tokenizer(_load(folder))
    except Exception as error:  # transformers raises many kinds for broken files
        raise ConfigError("tokenizer", str(folder), f"a folder whose tokenizer loads ({error})") from error


def _load(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if (folder / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        from transformers import AutoTokenizer  # imports torch, but alone converts the older file formats

        return AutoTokenizer.from_pretrained(folder, local_files_only=True)


class Tokenizer:
    """Encodes and decodes with a fast tokenizer of transformers; safe for several threads at once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        decoder = self._backend.decoder
        described = decoder.__getstate__().decode() if decoder is not None else ""
        self._byte_level = '"ByteLevel"' in described
        self.token_text = lru_cache(maxsize=1 << 16)(self._token_text)
        self.token_bytes = lru_cache(maxsize=1 << 16)(self._token_bytes)

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text, as the tokenizer knows it; chat models' may differ from the model's."""
        found: int | None = self._tokenizer.eos_token_id
        return found

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises RequestError for text that is not valid Unicode."""
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeError, TypeError) as error:
            raise RequestError(f"the text cannot be encoded: {error}", param="prompt") from None
        return ids

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """`encode`, off the event loop when the text is long."""
        if len(text) < _LONG_TEXT:
            return self.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.encode, text, add_special_tokens=add_special_tokens)

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> tuple[str, list[int]]:
        """Text and ids of `messages` by the model's chat template; special tokens are the template's business.

        Raises:
            RequestError: no template, or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise RequestError("this model's tokenizer has no chat template; use /v1/completions", param="messages")
        extra = template_kwargs or {}
        reserved = extra.keys() & inspect.signature(self._tokenizer.apply_chat_template).parameters.keys()
        if reserved:
            names = ", ".join(sorted(reserved))
            raise RequestError(f"chat_template_kwargs must not set {names}", param="chat_template_kwargs")
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **extra,
            )
        except Exception as error:  # whatever the template, a program of the model's author, does
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error
        return text, self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that form no character become U+FFFD."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def _token_text(self, token_id: int) -> str:
        """One token for people: its text, or `bytes:\\x..` when it is a part of a character."""
        raw = self._token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that one token stands for, exact also for parts of characters."""
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        if self._byte_level and all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        return self.decode([token_id], skip_special_tokens=False).encode()


def _byte_alphabet() -> dict[str, int]:
    """Byte of each character of byte-level BPE: printable Latin-1 bytes stand for themselves, others follow at 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
