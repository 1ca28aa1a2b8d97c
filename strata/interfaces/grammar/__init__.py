"""Answers that follow a grammar: what clients ask for, and the constraint that llguidance makes of it."""
