"""Digest of what a kernel path's sources compute, by which evidence is bound to them.

The digest of a module is the sha256 of its syntax tree, written out by ourselves, in which
- comments, docstrings, positions, and what stands under TYPE_CHECKING are left out;
- each import of a module of this package is replaced by the name it binds, the name it takes, and the digest of that
  module.
So a digest covers everything that a path imports within the package, however deep, and nothing else. It stays the same
when a file is moved, reworded or formatted, and under another version of Python; it changes when an expression does.
`ast.dump` would not do: what it prints differs between Python 3.11, 3.12 and 3.13.
"""

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parent.parent  # of the package whose modules are followed
_HOME = __name__.removesuffix("kernels.identity.source_digest")  # "", and "hallmark." in an installed package
_WITHOUT_EFFECT = frozenset({"kind", "type_comment", "type_ignores", "ctx"})  # fields of nodes


class SourceDigests:
    """Digests of the modules of one package, each read once."""

    def __init__(self, root: Path = _ROOT) -> None:
        """`root`: the folder of a package; modules are named from its parent, e.g. `kernels.sdpa.backends`."""
        self._root = root
        self._package = root.name
        self._known: dict[str, str] = {}
        self._open: list[str] = []  # modules whose digest is being computed, outermost first
        self._imports: dict[str, set[str]] = {}

    def of(self, module: str) -> str:
        """sha256, as 64 hex digits, of what the module and all that it imports within the package compute.

        Raises FileNotFoundError for a module that does not exist, ValueError for modules that import each other.
        """
        if module in self._open:
            raise ValueError(f"modules import each other: {' -> '.join([*self._open, module])}")
        if module not in self._known:
            self._open.append(module)
            try:
                tree = ast.parse(self._file(module).read_bytes())
                self._imports[module] = set()
                text = _Writer(self, module).written(tree)
                self._known[module] = hashlib.sha256(text.encode("ascii")).hexdigest()
            finally:
                self._open.pop()
        return self._known[module]

    def closure(self, module: str) -> frozenset[str]:
        """The module and every module of the package that its digest covers."""
        self.of(module)
        return frozenset({module}).union(*(self.closure(other) for other in self._imports[module]))

    def imported(self, importer: str, module: str, name: str) -> tuple[str, str]:
        """Resolve `from module import name`: (name within its module, "" for the module itself; digest)."""
        is_module = self._exists(f"{module}.{name}")
        source = f"{module}.{name}" if is_module else module
        self._imports[importer].add(source)
        return ("" if is_module else name), self.of(source)

    def is_ours(self, module: str) -> bool:
        return module == self._package or module.startswith(self._package + ".")

    def _file(self, module: str) -> Path:
        place = self._root.parent.joinpath(*module.split("."))
        return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")

    def _exists(self, module: str) -> bool:
        return self._file(module).is_file()


SOURCES = SourceDigests()  # of this package: what it holds follows from the files alone


class _Writer:
    """Writes a syntax tree as text of ASCII characters, the same under every version of Python."""

    def __init__(self, digests: SourceDigests, module: str) -> None:
        self._digests = digests
        self._module = module
        self._text: list[str] = []

    def written(self, tree: ast.Module) -> str:
        self._write(tree)
        return "".join(self._text)

    def _write(self, value: object) -> None:
        if isinstance(value, ast.AST):
            self._write_node(value)
        elif isinstance(value, list):
            self._text.append("[")
            for item in value:
                self._write(item)
                self._text.append(",")
            self._text.append("]")
        else:  # a name, a number, a string: what `repr` escapes depends on the version's Unicode tables
            self._text.append(f"{type(value).__name__}:{value!a}")

    def _write_node(self, node: ast.AST) -> None:
        self._text.append(f"{type(node).__name__}(")
        for name in node._fields:
            value = getattr(node, name, None)
            if name == "body" and isinstance(value, list):
                value = list(self._statements(node, value))
            elif name == "values" and isinstance(node, ast.JoinedStr):
                value = _joined(node.values)
            # Empty fields are left out: newer versions have more of them. `kind` is the u of u"...".
            if value is not None and value != [] and name not in _WITHOUT_EFFECT:
                self._text.append(f"{name}=")
                self._write(value)
                self._text.append(";")
        self._text.append(")")

    def _statements(self, owner: ast.AST, body: list[ast.stmt]) -> Iterator[ast.stmt | str]:
        """A body without docstring and TYPE_CHECKING; imports within the package come first, sorted, as text."""
        has_docstring = isinstance(owner, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        remaining: list[ast.stmt] = []
        imports: list[str] = []
        for index, statement in enumerate(body):
            if has_docstring and index == 0 and _is_text(statement):
                continue
            if isinstance(statement, ast.If) and _name_of(statement.test) == "TYPE_CHECKING":
                continue
            taken = self._imports(statement)
            if taken is None:
                remaining.append(statement)
            else:
                imports += taken
        yield from sorted(imports)
        yield from remaining

    def _imports(self, statement: ast.stmt) -> list[str] | None:
        """A line for each name that an import within the package binds; None for any other statement."""
        if isinstance(statement, ast.Import):
            if any(self._digests.is_ours(alias.name.removeprefix(_HOME)) for alias in statement.names):
                raise ValueError(f"{self._module} line {statement.lineno}: write `from package import module`")
            return None
        if not isinstance(statement, ast.ImportFrom):
            return None
        if statement.level:
            raise ValueError(f"{self._module} line {statement.lineno}: relative imports are not followed")
        module = (statement.module or "").removeprefix(_HOME)
        if not self._digests.is_ours(module):
            return None
        found = []
        for alias in statement.names:
            name, digest = self._digests.imported(self._module, module, alias.name)
            found.append(f"{alias.asname or alias.name} is {name or 'module'} of {digest}")
        return found


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _name_of(test: ast.expr) -> str:
    return test.attr if isinstance(test, ast.Attribute) else test.id if isinstance(test, ast.Name) else ""


def _joined(values: list[ast.expr]) -> list[ast.expr]:
    """Parts of an f-string with neighbouring texts joined: versions differ in where they split them."""
    joined: list[ast.expr] = []
    for value in values:
        last = joined[-1] if joined else None
        if isinstance(value, ast.Constant) and isinstance(last, ast.Constant):
            joined[-1] = ast.Constant(str(last.value) + str(value.value))
        else:
            joined.append(value)
    return [value for value in joined if not (isinstance(value, ast.Constant) and value.value == "")]
