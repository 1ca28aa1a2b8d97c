"""Speculative decoding: somebody proposes the next tokens, one forward pass says which of them come.

`proposer` is what proposes (`ngram`, `draft_model`); `speculator` decides how many proposals a step
verifies, from what was accepted (`acceptance`, `draft_length`) and from what steps cost (`step_times`,
`choice`, `ledger`). The engine verifies: it samples after every row as if there were no draft, and stops
where the draft is not what was sampled. docs/speculation.md says why that is exact.
"""
