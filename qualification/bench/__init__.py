"""`hallmark bench attention`: every path that can run beside its peers, timed in one process. Imports no server."""
