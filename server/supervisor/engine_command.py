"""The command that starts the engine process."""

from kernels.system.child_process import python_command

# OpenMP threads spin between two operations by default and take the cores from everybody else: on 2 busy cores a token
# of the demo model took 44 ms, and 6 ms with threads that sleep. It is read when torch loads the library, not later.
# PyTorch's profiler writes lines of its own between those of the log, unless its level is above all of them.
# The ranks of a tensor-parallel engine meet over the loopback: a host's own name may lead nowhere.
_ENVIRONMENT = ("OMP_WAIT_POLICY=passive", "KINETO_LOG_LEVEL=6", "GLOO_SOCKET_IFNAME=lo")
ENGINE_COMMAND = python_command("server.engine.process", environment=_ENVIRONMENT)
