"""The prompt of a chat request: its messages through the model's template, off the event loop."""

from __future__ import annotations

import asyncio

from .protocol import ChatRequest
from .tokenizer import Tokenizer


async def encode_chat(tokenizer: Tokenizer, body: ChatRequest) -> tuple[str, list[int]]:
    """Text and token ids of the prompt. Raises RequestError as `Tokenizer.encode_chat`."""
    return await asyncio.to_thread(
        tokenizer.encode_chat,
        [message.for_template() for message in body.messages],
        add_generation_prompt=body.generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=body.chat_template_kwargs,
    )
