"""Anthropic's Messages API over the same engine: bodies are turned into chats, answers into its shapes."""
