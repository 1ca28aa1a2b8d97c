"""The first hour on a card in one script: `scripts/device_check.sh`. None of it has run on a GPU so far."""
