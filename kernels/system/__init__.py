"""Access to the machine and its operating system: devices, child processes, shared files, caches, environment."""
