"""What talks to the operating system: child processes, files that processes share, caches, the environment."""
