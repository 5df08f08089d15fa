"""Figures of the code base: names, imports, complexity, dead code, start-up time.

    python scripts/house_figures.py [--tree DIR] [--start-up] [--json]

``--tree`` measures another checkout, so that two of them can be compared. ``--start-up`` also
measures the CPU seconds of commands, each the least of several runs.

Dead code is what neither the source nor benchmarks, docs or examples mention; tests do not count as
a use. Not counted as dead: contract tests (``*Contract``), which other implementations inherit, and
names that Python (``__dir__``) and Alembic (``downgrade``) call.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

COMPLEX = ("--select=C901,PLR0912,PLR0915",)
LIMITS = (
    "lint.mccabe.max-complexity=12",
    "lint.pylint.max-branches=12",
    "lint.pylint.max-statements=50",
)
PRIVATE_LOCALS = {"told", "asked", "said", "found", "each", "words", "place", "kept"}
PRIVATE_VERBS = ("tell_", "settle", "look", "hear", "let_", "foretell", "foresee")
CALLED_BY_OTHERS = re.compile(r"__\w+__|downgrade|\w+Contract")
USED_FROM = ("benchmarks", "docs", "examples", "README.md")
BELOW_CLIENT_IS_FINE = {"cli", "client", "render", "spec", "core", "__init__"}
REPEATS = 5
SECTION = re.compile(r"^yunlu\.")


def main() -> None:
    """Measure one tree and print its figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--start-up", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    source = options.tree / "src" / "yunlu"
    trees = {path: ast.parse(path.read_text("utf-8")) for path in sorted(source.rglob("*.py"))}
    figures: dict[str, object] = {
        **count_lines(trees),
        **count_class_names(trees),
        **count_private_words(trees),
        **count_cli_imports(trees, source),
        **count_complex_functions(options.tree, trees),
        **find_knots(trees, source),
        **count_dead_code(trees, options.tree),
    }
    if options.start_up:
        figures |= measure_start_up(options.tree)
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    width = max(map(len, figures))
    for name, value in figures.items():
        print(f"{name:<{width}}  {value}")


def count_lines(trees: dict[Path, ast.Module]) -> dict[str, object]:
    """Size of the tree."""
    lines = sum(path.read_text("utf-8").count("\n") for path in trees)
    return {"files": len(trees), "lines": lines}


def count_class_names(trees: dict[Path, ast.Module]) -> dict[str, object]:
    """Class names that are defined more than once."""
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(str(path))
    repeated = sorted(name for name, paths in homes.items() if len(paths) > 1)
    share = 100 * len(repeated) / len(homes)
    return {"class names used twice, %": round(share, 2), "repeated class names": repeated}


def count_private_words(trees: dict[Path, ast.Module]) -> dict[str, object]:
    """Locals, parameters and functions whose names say nothing to a reader from the field."""
    local_names, functions = find_private_words(trees)
    return {
        "locals called told, asked, each, ...": len(local_names),
        "functions called tell_, settle, look, ...": len(functions),
    }


def find_private_words(trees: dict[Path, ast.Module]) -> tuple[list[str], list[str]]:
    """Where they stand, as ``path:line: name``: locals and parameters, then functions."""
    local_names: list[str] = []
    functions: list[str] = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                if node.id in PRIVATE_LOCALS:
                    local_names.append(f"{path}:{node.lineno}: {node.id}")
            elif isinstance(node, ast.arg):
                if node.arg in PRIVATE_LOCALS:
                    local_names.append(f"{path}:{node.lineno}: {node.arg}")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.lstrip(
                "_"
            ).startswith(PRIVATE_VERBS):
                functions.append(f"{path}:{node.lineno}: {node.name}")
    return local_names, functions


def count_cli_imports(trees: dict[Path, ast.Module], source: Path) -> dict[str, object]:
    """Modules below the client that the CLI imports at run time."""
    modules: set[str] = set()
    for path, tree in trees.items():
        if path.relative_to(source).parts[0] == "cli":
            modules |= {
                module for module in imports_of(tree) if room_of(module) not in BELOW_CLIENT_IS_FINE
            }
    rooms = {room_of(module) for module in modules}
    return {"modules the CLI imports below the client": len(modules), "in rooms": len(rooms)}


def imports_of(tree: ast.Module) -> set[str]:
    """Modules of the project that a module imports, without those for types only."""
    typing_only: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            typing_only |= {id(inner) for inner in ast.walk(node)}
    modules: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and SECTION.match(node.module):
            modules.add(node.module)
        elif isinstance(node, ast.Import):
            modules |= {name.name for name in node.names if SECTION.match(name.name)}
    return modules


def room_of(module: str) -> str:
    """Room of a module: the part behind ``yunlu.``."""
    return ([*module.split("."), "__init__"])[1]


def count_complex_functions(tree: Path, trees: dict[Path, ast.Module]) -> dict[str, object]:
    """Functions above the limits of complexity, for ten thousand lines."""
    config = [word for limit in LIMITS for word in ("--config", limit)]
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--quiet",
        "--output-format=json",
    ]
    done = subprocess.run(  # noqa: S603 (our own words)
        [*command, *COMPLEX, *config, str(tree / "src")],
        capture_output=True,
        text=True,
        check=False,
    )
    places = {(row["filename"], row["location"]["row"]) for row in json.loads(done.stdout or "[]")}
    lines = sum(path.read_text("utf-8").count("\n") for path in trees)
    return {"complex functions per 10k lines": round(1e4 * len(places) / lines, 2)}


def find_knots(trees: dict[Path, ast.Module], source: Path) -> dict[str, object]:
    """Modules in the largest cycle of imports."""
    graph = {module_of(path, source): set[str]() for path in trees}
    for path, tree in trees.items():
        module = module_of(path, source)
        graph[module] = {name for name in imports_of(tree) if name in graph and name != module}
    largest = max((len(knot) for knot in cycles(graph)), default=0)
    return {"modules in the largest import knot": largest}


def module_of(path: Path, source: Path) -> str:
    """Dotted name of a file."""
    parts = path.relative_to(source.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Strongly connected components of more than one module (Tarjan, without recursion)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[set[str]] = []
    for root, children in graph.items():
        if root in index:
            continue
        work = [(root, iter(sorted(children)))]
        index[root] = low[root] = len(index)
        stack.append(root)
        while work:
            node, following = work[-1]
            child = next(following, None)
            if child is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = set[str]()
                    while node not in component:
                        component.add(stack.pop())
                    components.append(component)
            elif child not in index:
                index[child] = low[child] = len(index)
                stack.append(child)
                work.append((child, iter(sorted(graph[child]))))
            elif child in stack:
                low[node] = min(low[node], index[child])
    return [component for component in components if len(component) > 1]


def count_dead_code(trees: dict[Path, ast.Module], tree: Path) -> dict[str, object]:
    """Lines of functions and classes that nothing else mentions, entry points aside."""
    mentions: Counter[str] = Counter()
    for path in trees:
        text = path.read_text("utf-8")
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                mentions[token.string] += 1
            elif token.type == tokenize.STRING:
                mentions.update(re.findall(r"\w+", token.string) if len(token.string) < 100 else ())
    for name in USED_FROM:
        for path in [tree / name, *sorted((tree / name).rglob("*"))]:
            if path.suffix in {".py", ".md"}:
                mentions.update(re.findall(r"\w+", path.read_text("utf-8")))
    entry_points = (tree / "pyproject.toml").read_text("utf-8")
    dead: list[str] = []
    lines = 0
    for path, module in trees.items():
        for node in module.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if (
                mentions[node.name] == 1
                and not node.decorator_list
                and not CALLED_BY_OTHERS.fullmatch(node.name)
                and node.name not in entry_points
            ):
                lines += (node.end_lineno or node.lineno) - node.lineno + 1
                dead.append(f"{path.name}:{node.name}")
    total = sum(path.read_text("utf-8").count("\n") for path in trees)
    return {"dead code, %": round(100 * lines / total, 2), "unmentioned": dead}


def measure_start_up(tree: Path) -> dict[str, object]:
    """CPU seconds of commands: the least of several runs, children included."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    job = {"task": "image-classification", "model": "cnn", "data": "sklearn:digits"}
    with tempfile.TemporaryDirectory() as home:
        environment["YUNLU_HOME"] = home
        path = Path(home) / "job.yaml"
        path.write_text(json.dumps(job | {"train": {"steps": 1}}), "utf-8")
        program = [sys.executable, "-m", "yunlu.cli.main"]
        commands = {
            "CPU-s of yunlu --help": [*program, "--help"],
            "CPU-s of yunlu plan --help": [*program, "plan", "--help"],
            "CPU-s of yunlu train, one step": [*program, "train", str(path)],
        }
        return {
            name: round(min(cpu_seconds(command, environment) for _ in range(REPEATS)), 2)
            for name, command in commands.items()
        }


def cpu_seconds(command: list[str], environment: dict[str, str]) -> float:
    """User and system time of a command and what it started."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=environment, capture_output=True, check=True)  # noqa: S603
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
