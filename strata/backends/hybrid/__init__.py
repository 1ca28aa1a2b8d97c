"""Hybrid execution: attention and cached experts on a device, missed experts there or on the CPU.

See docs/design.md, sections 5 and 6.
"""
