"""One file per command; each has a `command` that cli.py finds by the file's name."""
