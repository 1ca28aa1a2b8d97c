"""See docs/design.md, section 2."""
