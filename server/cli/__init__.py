"""The command line: `hallmark`."""
