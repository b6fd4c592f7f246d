"""The trial of each operator, which is what a qualification does to its shapes, and the failures that end one."""
