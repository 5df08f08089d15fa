"""Write docs/api.md, the reference of the public Python API, from signatures and docstrings.

    python scripts/make_api_page.py [--check]

``--check`` writes nothing and fails where the page is out of date. The source is parsed, not imported,
so the page does not depend on what is installed. Classes are found by their names, which are unique.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
import tomllib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "yunlu"
PAGE = ROOT / "docs" / "api.md"
INTRODUCTION = """\
# Python API

Written by `python scripts/make_api_page.py` from signatures and docstrings: change those, not this page.
[Yunlu from Python](python.md) shows how to use it; [the job file](job-file.md) explains every key of a job.
"""
JOB_PAGE = "Every key: [the job file](job-file.md)."
PLAIN_BASES = {"Value", "Protocol", "StrEnum", "NamedTuple", "RunEvent"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Field:
    """A documented attribute of a class."""

    name: str
    type: str
    text: str


@dataclass(frozen=True)
class Source:
    """All modules of the package, parsed."""

    package: Path
    classes: dict[str, ast.ClassDef] = field(default_factory=dict[str, ast.ClassDef])
    modules: dict[str, str] = field(default_factory=dict[str, str])
    """Module of each class."""

    @classmethod
    def read(cls, package: Path) -> Source:
        """Parse every module."""
        source = cls(package)
        for path in sorted(package.rglob("*.py")):
            for node in ast.parse(path.read_text("utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    source.classes[node.name] = node
                    source.modules[node.name] = _module_name(path, package)
        return source

    @cached_property
    def public(self) -> dict[str, str]:
        """Public names in their order, each with the module it comes from."""
        tree = ast.parse((self.package / "__init__.py").read_text("utf-8"))
        assigned = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        homes: dict[str, str] = ast.literal_eval(assigned["_HOMES"])
        return {name: homes[name] for name in ast.literal_eval(assigned["__all__"])}

    def function(self, module: str, name: str) -> Function | None:
        """The function of this name in a module; of overloads, the implementation."""
        path = self.package.parent / Path(*module.split("."))
        tree = ast.parse(path.with_suffix(".py").read_text("utf-8"))
        matching = [node for node in tree.body if isinstance(node, Function) and node.name == name]
        return matching[-1] if matching else None

    def lineage(self, name: str) -> list[ast.ClassDef]:
        """A class after its own bases in this package."""
        node = self.classes[name]
        bases = [base for base in _base_names(node) if base in self.classes]
        above = [part for base in bases if base not in PLAIN_BASES for part in self.lineage(base)]
        return [*above, node]

    def fields(self, name: str) -> list[Field]:
        """Public attributes, those of bases first."""
        found: dict[str, Field] = {}
        for node in self.lineage(name):
            found |= {entry.name: entry for entry in _own_fields(node)}
        return list(found.values())

    def methods(self, name: str) -> list[Function]:
        """Public methods and properties, those of bases first."""
        found: dict[str, Function] = {}
        for node in self.lineage(name):
            found |= {part.name: part for part in _public_methods(node)}
        return list(found.values())

    @cached_property
    def verbs(self) -> list[str]:
        """Parts of the client's protocol."""
        return [base for base in _base_names(self.classes["Client"]) if base != "Protocol"]

    @cached_property
    def returned(self) -> list[str]:
        """Values that public calls and verbs return, by name."""
        functions = [self.function(module, name) for name, module in self.public.items()]
        owners = [*self.verbs, *(name for name in self.public if name in self.classes)]
        methods = [method for owner in owners for method in self.methods(owner)]
        returns = [node.returns for node in (*functions, *methods) if node is not None]
        named = self.named(*(ast.unparse(node) for node in returns if node is not None))
        return sorted(name for name in named if self.is_value(name) and name not in self.public)

    def reachable(self, names: Iterable[str]) -> list[str]:
        """Values among these names and whatever their fields hold, by name."""
        found: set[str] = set()
        waiting = [name for name in names if self.is_value(name)]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                types = [entry.type for entry in self.fields(name)]
                waiting += [other for other in self.named(*types) if self.is_value(other)]
        return sorted(found)

    def named(self, *annotations: str) -> list[str]:
        """Classes of this package that annotations name."""
        words = [word for text in annotations for word in re.findall(r"\w+", text)]
        return [word for word in dict.fromkeys(words) if word in self.classes]

    def is_value(self, name: str) -> bool:
        """Whether a class is a record: pydantic value or dataclass, and no event."""
        lines = self.lineage(name) if name in self.classes else []
        bases = {base for node in lines for base in _base_names(node)}
        is_dataclass = any("dataclass" in ast.unparse(d) for n in lines for d in n.decorator_list)
        return ("Value" in bases or is_dataclass) and "RunEvent" not in bases


def main() -> int:
    """Write the page, or say whether it is up to date."""
    parser = argparse.ArgumentParser(description="Write docs/api.md.")
    parser.add_argument("--check", action="store_true", help="fail where the page is out of date")
    options = parser.parse_args()
    page = make_page(Source.read(PACKAGE), (ROOT / "pyproject.toml").read_text("utf-8"))
    if not options.check:
        PAGE.write_text(page, "utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text("utf-8") == page:
        return 0
    print(f"{PAGE.relative_to(ROOT)} is out of date: run python scripts/make_api_page.py")
    return 1


def make_page(source: Source, project: str) -> str:
    """The whole page."""
    sections = [
        ("The package", list(show_package(source))),
        ("The client", list(show_client(source))),
        ("Doors", list(show_doors(source, project))),
        ("Values", list(show_values(source))),
    ]
    lines = [*INTRODUCTION.splitlines(), ""]
    for title, body in sections:
        parts = [line.removeprefix("### ") for line in body if line.startswith("### ")]
        lines.append(f"- {_link(title, title)}: {', '.join(_link(part, part) for part in parts)}")
    for title, body in sections:
        lines += ["", f"## {title}", "", *body]
    return "\n".join(_without_double_blanks(lines)).rstrip() + "\n"


def show_package(source: Source) -> Iterator[str]:
    """What ``import yunlu`` offers."""
    for name, module in source.public.items():
        yield from ("", f"### yunlu.{name}", "")
        function = source.function(module, name)
        if function is not None:
            yield from _show_function(function)
        else:
            yield from _show_class(source, name)


def show_client(source: Source) -> Iterator[str]:
    """Verbs of the client, by kind."""
    yield f"`{source.modules['Client']}`. {_doc(source.classes['Client'])}"
    yield "`LocalClient` implements it on this machine."
    for base in source.verbs:
        yield from ("", f"### {base}", "", _doc(source.classes[base]), "")
        yield from _table(
            ("verb", "returns", "what it does"),
            ((_code(_call(m)), _returns(source, m), _doc(m)) for m in source.methods(base)),
        )


def show_doors(source: Source, project: str) -> Iterator[str]:
    """Protocols that others may implement, their contracts, and what is built in."""
    groups: dict[str, dict[str, str]] = tomllib.loads(project)["project"]["entry-points"]
    doors = {_singular(group.removeprefix("yunlu.")): group for group in sorted(groups)}
    suffix = "Contract"
    contracts = {n.removesuffix(suffix): n for n in source.classes if n.endswith(suffix)}
    yield "An implementation is one file and one entry point; its test inherits the contract."
    yield "[CONTRIBUTING](../CONTRIBUTING.md#doors) says how."
    for door in sorted({*doors, *contracts}):
        yield from ("", f"### {door}", "")
        if door == "Client":
            yield from (f"The verbs of {_link('the client', 'The client')}.", "")
        elif door in source.classes:
            yield from (f"`{source.modules[door]}`. {_doc(source.classes[door])}", "")
        if door in doors:
            names = _join(groups[doors[door]])
            yield from (f"Entry point group `{doors[door]}`; built in: {names}.", "")
        if door in source.classes and door != "Client":
            yield from _show_members(source, door)
        if door in contracts:
            yield from _show_contract(source, contracts[door])


def show_values(source: Source) -> Iterator[str]:
    """Records that the public calls and verbs return; those inside them, a row each."""
    yield "Frozen records; values of the client survive a trip through JSON (`model_dump_json`)."
    for name in source.returned:
        about = f"`{source.modules[name]}`. {_doc(source.classes[name])}"
        yield from ("", f"### {name}", "", about, "")
        yield from _show_members(source, name)
    yield from ("", "### Parts of values", "", "What the fields above hold.", "")
    shown = {*source.public, *source.returned, *source.reachable(["Job"])}
    inside = [name for name in source.reachable(source.returned) if name not in shown]
    yield from _table(
        ("value", "meaning", "fields"),
        (
            (_code(name), _doc(source.classes[name]), _join(f.name for f in source.fields(name)))
            for name in inside
        ),
    )


def _show_function(node: Function) -> Iterator[str]:
    yield from ("```py", _signature(node), "```", "", _doc(node), "")
    yield from _show_arguments(node)


def _show_class(source: Source, name: str) -> Iterator[str]:
    own = source.classes[name]
    holders = [(node, part) for node in source.lineage(name) for part in _constructors(node)]
    for holder, constructor in holders[-1:]:
        yield from ("```py", _signature(constructor, name=name), "```", "", _doc(own), "")
        users = [other for other in source.public if other in source.classes]
        first = next(other for other in users if holder in source.lineage(other))
        if first == name:
            yield from _show_arguments(constructor)
        else:
            yield from (f"Arguments as of {_link(f'yunlu.{first}', f'yunlu.{first}')}.", "")
    if not holders:
        yield from (_doc(own) + (f" {JOB_PAGE}" if name == "Job" else ""), "")
    yield from _show_members(source, name)


def _constructors(node: ast.ClassDef) -> list[Function]:
    return [p for p in node.body if isinstance(p, ast.FunctionDef) and p.name == "__init__"]


def _show_arguments(node: Function) -> Iterator[str]:
    if entries := _arguments(ast.get_docstring(node) or ""):
        yield from _table(("argument", "meaning"), ((_code(n), text) for n, text in entries))


def _show_members(source: Source, name: str) -> Iterator[str]:
    """A line for each documented field and method; the other fields in one."""
    fields = source.fields(name)
    if plain := _join(f"{f.name}: {f.type}" for f in fields if not f.text):
        yield from (f"{plain}.", "")
    yield from (f"- {_code(f'{f.name}: {f.type}')} {f.text}" for f in fields if f.text)
    for method in source.methods(name):
        if not _is_validator(method):
            head = method.name if _is_property(method) else _call(method)
            arrow = ":" if _is_property(method) else " ->"
            returns = "" if method.returns is None else f"{arrow} {_type(method.returns)}"
            yield f"- {_code(head + returns)} {_doc(method)}"


def _show_contract(source: Source, name: str) -> Iterator[str]:
    methods = [method.name for method in source.methods(name)]
    tests = [method for method in methods if method.startswith("test_")]
    hooks = _join(method for method in methods if method not in tests)
    override = f"; override {hooks}" if hooks else ""
    yield from ("", f"Contract `{source.modules[name]}.{name}`{override}. It tests:")
    yield "; ".join(test.removeprefix("test_").replace("_", " ") for test in tests) + "."


def _own_fields(node: ast.ClassDef) -> Iterator[Field]:
    following = [*node.body[1:], None]
    for part, after in zip(node.body, following, strict=True):
        if not isinstance(part, ast.AnnAssign) or not isinstance(part.target, ast.Name):
            continue
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = _plain(str(after.value.value))
        type_ = _type(part.annotation)
        if not part.target.id.startswith("_") and "ClassVar" not in type_:
            yield Field(part.target.id, type_, text)


def _public_methods(node: ast.ClassDef) -> list[Function]:
    functions = [part for part in node.body if isinstance(part, Function)]
    return [part for part in functions if part.name[0] != "_" and not _is_overload(part)]


def _is_overload(node: Function) -> bool:
    return any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list)


def _is_property(node: Function) -> bool:
    names = {ast.unparse(decorator) for decorator in node.decorator_list}
    return bool(names & {"property", "cached_property"})


def _is_validator(node: Function) -> bool:
    return any("validator" in ast.unparse(decorator) for decorator in node.decorator_list)


def _base_names(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]


def _signature(node: Function, *, name: str | None = None) -> str:
    """The call, in lines of 100 columns."""
    returns = "" if node.returns is None or name else f" -> {_type(node.returns)}"
    # Lines are broken between arguments only.
    arguments = ", ".join(text.replace(" ", "\0") for text in _split_arguments(node))
    call = f"{name or node.name}({arguments}){returns}"
    lines = textwrap.fill(call, 100, subsequent_indent="    ", break_long_words=False)
    return lines.replace("\0", " ")


def _split_arguments(node: Function) -> list[str]:
    """Arguments as text, without ``self``."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + [*given.defaults]
    texts = [_argument(one, default) for one, default in zip(positional, defaults, strict=True)]
    if given.vararg:
        texts.append(f"*{_argument(given.vararg, None)}")
    elif given.kwonlyargs:
        texts.append("*")
    texts += [
        _argument(one, default)
        for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    if given.kwarg:
        texts.append(f"**{_argument(given.kwarg, None)}")
    return [text for text in texts if text not in {"self", "cls", "/"}]


def _argument(one: ast.arg, default: ast.expr | None) -> str:
    text = one.arg if one.annotation is None else f"{one.arg}: {_type(one.annotation)}"
    if default is None:
        return text
    equals = "=" if one.annotation is None else " = "
    return f"{text}{equals}{ast.unparse(default)}"


def _call(node: Function) -> str:
    """Name and arguments without their types."""
    names = [re.split(r"[:=]", text, maxsplit=1)[0].strip() for text in _split_arguments(node)]
    return f"{node.name}({', '.join(names)})"


def _returns(source: Source, node: Function) -> str:
    text = "" if node.returns is None else _type(node.returns)
    return _link(_code(text), text) if text in source.returned else _code(text)


def _type(node: ast.expr) -> str:
    """An annotation without metadata of pydantic and without the mark of private aliases."""
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Annotated":
        assert isinstance(node.slice, ast.Tuple)
        return _type(node.slice.elts[0])
    return re.sub(r"\b_(?=[A-Z])", "", ast.unparse(node))


def _arguments(docstring: str) -> list[tuple[str, str]]:
    """The entries of an ``Args:`` section."""
    _, _, text = docstring.partition("Args:\n")
    text = re.split(r"\n\n|\n(?=\S)", text, maxsplit=1)[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", text, re.MULTILINE)
    return [(name, _plain(meaning)) for name, meaning in entries]


def _doc(node: ast.ClassDef | Function) -> str:
    """First paragraph of a docstring, as Markdown."""
    return _plain((ast.get_docstring(node) or "").partition("\n\n")[0])


def _plain(text: str) -> str:
    """One line, with Markdown's quotes for code."""
    return " ".join(text.replace("``", "`").split())


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _join(names: Iterable[str]) -> str:
    return ", ".join(map(_code, names))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield "| " + " | ".join(re.sub(r"(?<!\\)\|", r"\|", cell) for cell in row) + " |"
    yield ""


def _link(text: str, title: str) -> str:
    return f"[{text}](#{_anchor(title)})"


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def _singular(plural: str) -> str:
    name = f"{plural[:-3]}y" if plural.endswith("ies") else plural.removesuffix("s")
    return name.capitalize()


def _module_name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def _without_double_blanks(lines: Iterable[str]) -> Iterator[str]:
    before = "-"
    for line in lines:
        if line or before:
            yield line
        before = line


if __name__ == "__main__":
    sys.exit(main())
