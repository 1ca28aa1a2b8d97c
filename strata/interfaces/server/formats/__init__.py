"""How models write reasoning and tool calls: one small file for each kind of format."""
