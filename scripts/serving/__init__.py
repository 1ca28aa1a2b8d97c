"""What the scripts about the server share: a process under test, and a client that times every event."""
