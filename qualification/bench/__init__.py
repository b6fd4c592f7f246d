"""Benches of attention beside its peers, and of servers under load (`hallmark bench`). Imports no server."""
