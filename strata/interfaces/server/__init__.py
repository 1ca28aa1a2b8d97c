"""The OpenAI-compatible HTTP service. Talks to one engine, which lives in a thread of its own."""
