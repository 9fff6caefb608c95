"""The process that speaks HTTP: OpenAI protocol, tokenizer, streaming, metrics."""
