"""A Python script, taken apart by ``ast``: calls with the values that stand in the file. Nothing runs."""

from __future__ import annotations

import ast
import operator
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from yunlu.core.errors import JobError


class UnknownValueError(Exception):
    """A value that only running the script would tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptCall:
    """One call: full name of what is called, and its arguments."""

    name: str
    """``transformers.TrainingArguments``; of a method ``.fit``."""
    line: int
    positional: list[ast.expr]
    keywords: dict[str, ast.expr]
    receiver: ast.expr | None = None
    """Of a method: what it is called on."""

    @property
    def last(self) -> str:
        """``TrainingArguments``."""
        return self.name.rpartition(".")[2]

    def is_of(self, *packages: str) -> bool:
        """Whether it comes from one of these packages."""
        return self.name.partition(".")[0] in packages


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What a script says."""

    name: str
    calls: list[ScriptCall]
    classes: dict[str, tuple[str, ...]]
    """Its own classes, and the full names of their bases."""
    methods: dict[str, dict[str, int]]
    """Of each class, the methods and their lines."""
    functions: dict[str, ast.FunctionDef]
    imported: frozenset[str]
    """The packages it imports."""
    tree: ast.Module
    _names: dict[str, list[ast.expr]] = field(default_factory=dict[str, list[ast.expr]])
    _options: dict[str, ast.expr] = field(default_factory=dict[str, ast.expr])
    _aliases: dict[str, str] = field(default_factory=dict[str, str])

    def value(self, node: ast.expr | None, depth: int = 0) -> Any:
        """The value of an expression of constants; raises ``UnknownValueError`` of any other."""
        if node is None or depth > _DEPTH:
            raise UnknownValueError
        return _ConstantFolder(self, depth).of(node)

    def full_name(self, node: ast.expr) -> str | None:
        """``torch.optim.AdamW`` of ``optim.AdamW``, by the imports; None of what is no name."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        return ".".join([self._aliases.get(node.id, node.id), *reversed(parts)])

    def assigned(self, name: str) -> ast.expr | None:
        """What a name stands for, where it is given a value once."""
        nodes = self._names.get(name, [])
        return nodes[0] if len(nodes) == 1 else None

    def option(self, name: str) -> ast.expr | None:
        """The default of an ``argparse`` option."""
        return self._options.get(name)


def read_script(text: str, name: str) -> Script:
    """Take a script apart."""
    try:
        tree = ast.parse(text)
        return _ScriptReader(name).read(tree)
    except SyntaxError as error:
        raise JobError(
            f"{name} is not valid Python: line {error.lineno}: {error.msg}.",
            hint="a notebook is exported by: jupyter nbconvert --to script",
        ) from error
    except (RecursionError, MemoryError, ValueError) as error:
        raise JobError(
            f"{name} cannot be read as Python: {error or 'nested too deeply'}."
        ) from None


_DEPTH = 20
_OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
}  # fmt: skip
_CASTS = {
    "str": str,
    "int": int,
    "float": float,
    "Path": str,
    "pathlib.Path": str,
    "list": list,
    "tuple": list,
}


@dataclass(frozen=True, slots=True)
class _ConstantFolder:
    """One expression; names are followed, to a depth."""

    script: Script
    depth: int

    def of(self, node: ast.expr) -> Any:  # noqa: PLR0911 (one for each kind of expression)
        match node:
            case ast.Constant(value=value):
                if isinstance(value, bytes | complex) or value is ...:
                    raise UnknownValueError
                return value
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self.of(item) for item in items]
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                return {self.of(self._present(key)): self.of(value) for key, value in pairs}
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand)
            case ast.BinOp(left=left, op=op, right=right):
                return self._computed(left, op, right)
            case ast.Name(id=name):
                return self._follow(self.script.assigned(name))
            case ast.Attribute(attr=attr):
                return self._attribute(node, attr)
            case ast.Call():
                return self._call(node)
            case _:
                raise UnknownValueError

    def _present(self, node: ast.expr | None) -> ast.expr:
        if node is None:  # {**other}
            raise UnknownValueError
        return node

    def _number(self, node: ast.expr) -> int | float:
        value = self.of(node)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UnknownValueError
        return value

    def _computed(self, left: ast.expr, op: ast.operator, right: ast.expr) -> int | float | str:
        if isinstance(op, ast.Add) and isinstance(text := self.of(left), str):
            return text + str(self.of(right))
        if isinstance(op, ast.Div) and isinstance(folder := self.of(left), str):  # of a Path
            return f"{folder}/{self.of(right)}"
        numbers = self._number(left), self._number(right)
        if isinstance(op, ast.Pow) and abs(numbers[0]) <= 1000 and abs(numbers[1]) <= 64:
            return numbers[0] ** numbers[1]
        if type(op) not in _OPERATORS:
            raise UnknownValueError
        try:
            return _OPERATORS[type(op)](*numbers)
        except ArithmeticError:
            raise UnknownValueError from None

    def _attribute(self, node: ast.expr, attr: str) -> Any:
        """``args.lr``, where an option ``--lr`` has a default."""
        default = self.script.option(attr)
        name = self.script.full_name(node) or ""
        owner = self.script.assigned(name.partition(".")[0])
        if default is not None and isinstance(owner, ast.Call):
            called = self.script.full_name(owner.func) or ""
            if called.rpartition(".")[2] in {"parse_args", "parse_known_args"}:
                return self._follow(default)
        if name.startswith(("torch.bfloat16", "torch.float16", "torch.float32")):
            return name
        raise UnknownValueError

    def _call(self, node: ast.Call) -> Any:
        name = self.script.full_name(node.func) or ""
        if name == "dict" and not node.args:
            return {keyword.arg: self.of(keyword.value) for keyword in node.keywords if keyword.arg}
        if name in {"os.path.join", "path.join"}:
            return "/".join(str(self.of(part)) for part in node.args)
        if name in _CASTS and len(node.args) == 1 and not node.keywords:
            try:
                return _CASTS[name](self.of(node.args[0]))
            except (TypeError, ValueError):
                raise UnknownValueError from None
        raise UnknownValueError

    def _follow(self, node: ast.expr | None) -> Any:
        return self.script.value(node, self.depth + 1)


class _ScriptReader(ast.NodeVisitor):
    """Collects; the script is made at the end."""

    def __init__(self, name: str) -> None:
        self._script_name = name
        self._names: defaultdict[str, list[ast.expr]] = defaultdict(list)
        self._options: dict[str, ast.expr] = {}
        self._aliases: dict[str, str] = {}
        self._calls: list[ast.Call] = []
        self._classes: list[ast.ClassDef] = []
        self._functions: dict[str, ast.FunctionDef] = {}
        self._imported: set[str] = set()

    def read(self, tree: ast.Module) -> Script:
        self.visit(tree)
        script = Script(
            name=self._script_name,
            calls=[],
            classes={},
            methods={},
            functions=self._functions,
            imported=frozenset(self._imported),
            tree=tree,
            _names=self._names,
            _options=self._options,
            _aliases=self._aliases,
        )
        for class_node in self._classes:
            script.classes[class_node.name] = tuple(
                script.full_name(base) or "" for base in class_node.bases
            )
            script.methods[class_node.name] = {
                part.name: part.lineno
                for part in class_node.body
                if isinstance(part, ast.FunctionDef)
            }
        for node in sorted(self._calls, key=lambda node: (node.lineno, node.col_offset)):
            script.calls.append(_as_call(script, node))
        return script

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            bound = alias.asname or alias.name.partition(".")[0]
            self._aliases[bound] = alias.name if alias.asname else bound
            self._imported.add(alias.name.partition(".")[0])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self._aliases[alias.asname or alias.name] = f"{node.module or ''}.{alias.name}"
        self._imported.add((node.module or "").partition(".")[0])

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._names[target.id].append(node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if isinstance(node.target, ast.Name) and node.value is not None:
            self._names[node.target.id].append(node.value)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):  # a second value: no constant any more
            self._names[node.target.id] += [node.value, node.value]
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._classes.append(node)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._functions[node.name] = node
        given = node.args.args[len(node.args.args) - len(node.args.defaults) :]
        for argument, default in zip(given, node.args.defaults, strict=True):
            self._names[argument.arg].append(default)
        for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
            if default is not None:
                self._names[argument.arg].append(default)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self._calls.append(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            self._note_option(node)
        self.generic_visit(node)

    def _note_option(self, node: ast.Call) -> None:
        flags = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
        default = next(
            (keyword.value for keyword in node.keywords if keyword.arg == "default"), None
        )
        long = [flag for flag in flags if isinstance(flag, str) and flag.startswith("--")]
        if long and default is not None:
            self._options[long[0].removeprefix("--").replace("-", "_")] = default


def _as_call(script: Script, node: ast.Call) -> ScriptCall:
    name, receiver = script.full_name(node.func), None
    if isinstance(node.func, ast.Attribute):
        receiver = node.func.value
        root = name.partition(".")[0] if name else ""
        if name is None or root not in script.imported:
            name = f".{node.func.attr}"
    keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
    for keyword in node.keywords:  # **{"lr": 1e-3}
        if keyword.arg is None:
            keywords |= _spread(script, keyword.value)
    return ScriptCall(
        name=name or "?",
        line=node.lineno,
        positional=list(node.args),
        keywords=keywords,
        receiver=receiver,
    )


def _spread(script: Script, node: ast.expr) -> dict[str, ast.expr]:
    followed = script.assigned(node.id) if isinstance(node, ast.Name) else node
    if not isinstance(followed, ast.Dict):
        return {}
    return {
        key.value: value
        for key, value in zip(followed.keys, followed.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }
