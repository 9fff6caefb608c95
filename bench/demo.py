"""run.sh demo: one real question about a long real text, answered cold and from every tier, restart included.

The text is Python's own documentation of its standard library, as installed; the store runs on while the instance is
stopped and started again.
"""

from __future__ import annotations

import pydoc
import sys
import tempfile
from pathlib import Path

from xllm_hier.embedded_store import EmbeddedStore
from xllm_hier.models.demo import demo_model_folder

from .serving import Answer, Client, serving, show

TEXT_CHARACTERS = 9000
QUESTION = "In one short sentence: what is the module described above for?"


def messages() -> list[dict[str, str]]:
    """A chat about the documentation of `shutil`, which Python carries."""
    text = pydoc.plain(pydoc.render_doc("shutil"))[:TEXT_CHARACTERS]
    return [{"role": "user", "content": f"{text}\n\n{QUESTION}"}]


def steps(client: Client) -> list[tuple[str, Answer]]:
    answers = []
    for name, forget in (("cold", ()), ("device", ()), ("host", ("device",)), ("store", ("device", "host"))):
        client.settle()
        if forget:
            client.clear(*forget)
        answers.append((name, client.ask(messages(), 40)))
    client.settle()
    return answers


def main() -> int:
    folder = demo_model_folder()
    with tempfile.TemporaryDirectory() as scratch:
        store = EmbeddedStore(Path(scratch), 1 << 30)
        store.start()
        settings = {
            "enable_kvcache_store": True,
            "host_blocks_factor": 2.0,
            "max_cache_size": 256 << 20,
            "store_master_server_address": store.master_address,
            "store_client_address": store.client_address,
        }
        try:
            with serving(folder, **settings) as client:
                answers = steps(client)
            with serving(folder, **settings) as client:
                answers.append(("store, after a restart", client.ask(messages(), 40)))
        finally:
            store.stop()
    cold = answers[0][1]
    rows = [
        [
            name,
            *(str(answer.tiers[tier]) for tier in ("device", "host", "store")),
            str(answer.prompt_tokens - sum(answer.tiers.values())),
            f"{answer.ttft_s * 1000:.0f} ms",
            f"{answer.ttft_s / cold.ttft_s * 100:.0f} %",
            "yes" if answer.token_ids == cold.token_ids else "NO",
        ]
        for name, answer in answers
    ]
    columns = ["run", "device", "host", "store", "computed", "first token", "of cold", "same tokens"]
    print(f"Question about {cold.prompt_tokens} tokens of Python's documentation: {QUESTION}")
    print(f"Answer: {cold.text.strip()}\n")
    show("prompt tokens by the tier that paid for them", columns, rows)
    return 0 if all(answer.token_ids == cold.token_ids for _, answer in answers) else 1


if __name__ == "__main__":
    sys.exit(main())
