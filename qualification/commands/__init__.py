"""The subcommands `qualify`, `matrix` and `matrix ptx` of `hallmark`."""
