"""Parts of `scripts/compare_peers.py`: building the peers, the models, runs, ratios and their tables."""
