"""Triton's interpreter, in half of its time where kernels call functions of their own."""

import inspect


def find_builtins_once() -> None:
    """Let the interpreter find the names of the language's builtin functions once.

    At each call of a function it puts its own builtins in place of the language's, and looks at every member of four
    namespaces for that: 9 s of 30 that the experts' kernels took (triton 3.6.0). Triton, which decides when it is
    imported whether its own functions are interpreted, is imported here: once the caller has said so.
    """
    from triton.runtime import interpreter

    names: dict[object, list[str]] = {}
    is_builtin = interpreter.tl.core.is_builtin
    put = vars(interpreter)["_patch_attr"]

    def put_all(namespace, builder, scope):
        if namespace not in names:
            names[namespace] = [name for name, member in inspect.getmembers(namespace) if is_builtin(member)]
        for name in names[namespace]:
            member = getattr(namespace, name)
            if is_builtin(member):  # it is not where a caller's are in place
                put(namespace, name, member, builder, scope)

    vars(interpreter)["_patch_builtin"] = put_all
