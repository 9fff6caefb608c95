"""The OpenAI protocol and what speaks it: shared by the api, the service and `LLM`."""
