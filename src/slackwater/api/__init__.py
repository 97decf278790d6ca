"""The OpenAI-compatible API over any Completer: schema, tokens, streams, keys."""
