"""Serving without the machine: real cache and policy, the cost model's seconds. See docs/memory.md."""
