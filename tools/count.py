"""Counts of the source tree beside what they should be: roads, lines, names, complexity, tests.

Run: python tools/count.py [ROOT] [--rev COMMIT] [--roads]. Statements do not depend on the line
length, so they compare revisions that were formatted differently. `--roads` walks three roads
(tools/roads.py, a minute). `--check` is part of the gate: src is no longer and has no more complex
functions than pyproject.toml allows, and no modules import one another in a circle.
"""

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
WIDTH = 100
COMPLEX = 10  # a function with more ways through it is too complex
ROADS: dict[str, tuple[str, tuple[str, ...], str]] = {  # road → what, its numbers, their aim
    "pretrain": (
        "files / modules / frames to the loss",
        ("files", "modules", "frames"),
        "70/130/9",
    ),
    "finetune": ("files / modules / frames to the loss", ("files", "modules", "frames"), "90/–/–"),
    "load": ("files to the logits", ("files",), "50"),
}


class Module:
    """One source file, parsed."""

    def __init__(self, path: Path, root: Path) -> None:
        self.text = path.read_text("utf-8")
        self.lines = self.text.splitlines()
        self.tree = ast.parse(self.text)
        self.nodes = list(ast.walk(self.tree))
        parts = path.relative_to(root).with_suffix("").parts
        self.name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def trivial(self) -> bool:
        return len(self.tree.body) <= 1

    @property
    def package(self) -> str:
        """The package under malmoi, or the module itself where it is in none."""
        return ".".join(self.name.split(".")[1:2]) or "malmoi"

    def statements(self) -> int:
        """Statements without docstrings."""
        documented = sum(
            ast.get_docstring(node, clean=False) is not None
            for node in self.nodes
            if isinstance(node, Definition | ast.Module)
        )
        return sum(isinstance(node, ast.stmt) for node in self.nodes) - documented

    def public_names(self) -> Iterator[str]:
        """Functions and classes defined at the top of the module."""
        for node in self.tree.body:
            if isinstance(node, Definition) and not node.name.startswith("_"):
                yield node.name

    def imports(self) -> Iterator[str]:
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                yield from (node.module, *(f"{node.module}.{a.name}" for a in node.names))
            elif isinstance(node, ast.Import):
                yield from (a.name for a in node.names)

    def imports_at_load(self, known: set[str]) -> Iterator[str]:
        """The known modules that loading this one imports: not what a function imports, or a type
        checker.
        """
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom) and node.module:
                inside = (f"{node.module}.{a.name}" for a in node.names)
                yield from (name if name in known else node.module for name in inside)
            elif isinstance(node, ast.Import):
                yield from (a.name for a in node.names)

    def complexities(self) -> Iterator[tuple[str, int]]:
        """Functions and methods, with what is defined inside them, and their complexity."""
        classes = [node for node in self.nodes if isinstance(node, ast.ClassDef)]
        for node in (n for owner in (self.tree, *classes) for n in owner.body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{self.name}.{node.name}", complexity(node)

    def packed(self) -> int:
        """Assignments such as `a, b = x, y`."""
        pairs = (
            n for n in self.nodes if isinstance(n, ast.Assign) and isinstance(n.value, ast.Tuple)
        )
        return sum(any(isinstance(t, ast.Tuple) for t in n.targets) for n in pairs)

    def docstring_lines(self) -> int:
        owners = (n for n in self.nodes if isinstance(n, Definition | ast.Module))
        return sum(len((ast.get_docstring(n) or "").splitlines()) for n in owners)

    def comments(self) -> int:
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return sum(token.type == tokenize.COMMENT for token in tokens)


def complexity(function: ast.AST) -> int:
    """McCabe's number as radon counts it: also boolean operators, comprehensions and asserts."""
    total = 0
    for node in ast.walk(function):
        match node:
            case ast.If() | ast.IfExp() | ast.Assert() | ast.FunctionDef() | ast.AsyncFunctionDef():
                total += 1
            case ast.For() | ast.While() | ast.AsyncFor():
                total += 1 + bool(node.orelse)
            case ast.Try():
                total += len(node.handlers) + bool(node.orelse)
            case ast.BoolOp():
                total += len(node.values) - 1
            case ast.comprehension():
                total += 1 + len(node.ifs)
            case ast.match_case(pattern=ast.MatchAs(pattern=None)):
                pass
            case ast.match_case():
                total += 1
    return total


def complex_functions(modules: list[Module]) -> dict[str, int]:
    """Functions over the limit, the worst first."""
    every = (pair for module in modules for pair in module.complexities())
    return dict(sorted((p for p in every if p[1] > COMPLEX), key=lambda pair: -pair[1]))


def test_imports(tests: list[Module]) -> tuple[int, int]:
    """Imports of our internals, and of the public package, by the tests."""
    names = [
        node.module if isinstance(node, ast.ImportFrom) else alias.name
        for module in tests
        for node in module.nodes
        if isinstance(node, ast.ImportFrom | ast.Import)
        for alias in node.names[: 1 if isinstance(node, ast.ImportFrom) else None]
    ]
    ours = [name for name in names if name and name.split(".")[0] == "malmoi"]
    return sum(name != "malmoi" for name in ours), sum(name == "malmoi" for name in ours)


def read(root: Path, folder: str) -> list[Module]:
    base = root / "src" if folder == "src" else root
    return [Module(path, base) for path in sorted((root / folder).rglob("*.py"))]


def one_word(modules: list[Module]) -> float:
    names = [n.name.strip("_") for m in modules for n in m.nodes if isinstance(n, Definition)]
    words = [n for n in names if "_" not in n and not re.search("[a-z][A-Z]", n)]
    return len(words) / len(names)


def single_importers(modules: list[Module]) -> int:
    importers: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for target in module.imports():
            importers[target].add(module.name)
    return sum(len(importers[m.name]) == 1 for m in modules if not m.trivial)


def package_edges(modules: list[Module]) -> set[tuple[str, str]]:
    """Pairs of packages of which the first imports the second, wherever in a file it does."""
    packages = {module.package for module in modules}
    return {
        (module.package, target)
        for module in modules
        for name in module.imports()
        if name.startswith("malmoi.")
        and (target := name.split(".")[1]) in packages - {module.package}
    }


def circular(edges: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The edges that lie on a circle."""
    after = {first: {b for a, b in edges if a == first} for first, _ in edges}

    def reaches(start: str, goal: str) -> bool:
        seen: set[str] = set()
        todo = [start]
        while todo:
            todo.extend(after.get(one := todo.pop(), set()) - seen)
            seen.add(one)
        return goal in seen

    return {(a, b) for a, b in edges if reaches(b, a)}


def module_circle(modules: list[Module]) -> list[str]:
    """Modules that import one another when they are loaded, or none."""
    names = {module.name for module in modules}
    edges = {
        (module.name, target)
        for module in modules
        for target in module.imports_at_load(names)
        if target in names and target != module.name
    }
    return sorted({name for edge in circular(edges) for name in edge})


def complaints(root: Path) -> Iterator[str]:
    """What the gate refuses."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    limits: dict[str, int] = project["tool"]["malmoi"]
    ceiling = limits["ceiling"]
    source = read(root, "src")
    statements = sum(m.statements() for m in source)
    if statements > ceiling:
        yield (
            f"src has {statements:,} statements, more than its ceiling of {ceiling:,}: delete as "
            "many as were added."
        )
    found = complex_functions(source)
    if len(found) > limits["complex"]:
        worst = ", ".join(f"{name} {value}" for name, value in list(found.items())[:5])
        yield (
            f"{len(found)} functions have a complexity over {COMPLEX}, more than the "
            f"{limits['complex']} allowed: {worst}…"
        )
    if circle := module_circle(source):
        yield f"These modules import one another in a circle: {', '.join(circle)}."


def rooms(root: Path) -> tuple[int, int]:
    inside = list((root / "src/malmoi").iterdir())
    packages = [p for p in inside if (p / "__init__.py").exists()]
    modules = [p for p in inside if p.suffix == ".py" and not p.stem.startswith("__")]
    return len(packages), len(modules)


def roads(root: Path) -> Iterator[tuple[str, str, str]]:
    """What runs before the first loss, and the rooms that the recipe is handed through."""
    script = Path(__file__).with_name("roads.py")
    path = os.environ | {"PYTHONPATH": str(root / "src")}
    for road, (what, names, aim) in ROADS.items():
        command = [sys.executable, str(script), road]
        ended = subprocess.run(command, env=path, capture_output=True, text=True, check=True)
        facts = json.loads(ended.stdout.splitlines()[-1])
        yield f"{road}: {what}", " / ".join(str(facts[name]) for name in names), aim
        if road == "pretrain":
            yield "recipe: rooms / returns", f"{facts['rooms']} / {facts['returns']}", "12/10"


def rows(root: Path) -> Iterator[tuple[str, str, str]]:
    """What is counted, how many, and the aim."""
    source = read(root, "src")
    tests = read(root, "tests")
    files = [m for m in source if not m.trivial]
    lines = _lines(source)
    statements = sum(m.statements() for m in source)
    yield "lines / statements of source", f"{lines:,} / {statements:,}", "48,000/27,000"
    defined = Counter(name for m in source for name in set(m.public_names()))
    twice = sum(n > 1 for n in defined.values())
    yield "public names; in more than one file", f"{len(defined):,}; {twice}", "falling; 0"
    over = complex_functions(source)
    yield (
        f"functions of complexity over {COMPLEX}; worst",
        f"{len(over)}; {max(over.values())}",
        "0",
    )
    yield "files in a circle of imports", str(len(module_circle(source))), "0"
    yield "tests ÷ source, lines", f"{_lines(tests) / lines:.2f}", "0.60"
    inside, public = test_imports(tests)
    yield "tests' imports, internals : malmoi", f"{inside} : {public}", "public first"
    yield "one-word names of functions and classes", f"{one_word(source):.0%}", ""
    wide = sum(len(line) > WIDTH for m in source for line in m.lines)
    yield f"lines over {WIDTH} columns", f"{wide / lines:.1%}", "0"
    packed = sum(m.packed() for m in source)
    yield "tuple-packed assignments per 1,000 lines", f"{1000 * packed / lines:.1f}", ""
    comments = 100 * sum(m.comments() for m in source) / lines
    docs = 100 * sum(m.docstring_lines() for m in source) / lines
    yield "comments / docstring lines per 100", f"{comments:.1f} / {docs:.1f}", ""
    short = sum(len(m.lines) < 100 for m in files) / len(files)
    yield "files; share under 100 lines", f"{len(files)}; {short:.0%}", ""
    yield "modules with one importer", str(single_importers(source)), ""
    yield "packages + top-level modules", " + ".join(map(str, rooms(root))), ""
    edges = package_edges([m for m in source if m.name != "malmoi"])
    yield "package-to-package edges; in a circle", f"{len(edges)}; {len(circular(edges))}", "; 0"
    yield "monkeypatches", str(sum(m.text.count("monkeypatch.") for m in tests)), ""


def packages(root: Path) -> Iterator[tuple[str, int, int, int]]:
    """Name, files, lines and statements of each package, the largest first."""
    found: dict[str, list[Module]] = defaultdict(list)
    for module in read(root, "src"):
        found[module.package].append(module)
    for name, modules in sorted(found.items(), key=lambda item: -_lines(item[1])):
        yield name, len(modules), _lines(modules), sum(m.statements() for m in modules)


def _lines(modules: list[Module]) -> int:
    return sum(len(m.lines) for m in modules)


def report(root: Path, *, walk: bool) -> None:
    print(f"{'':50}{'today':22}aim")
    for what, value, aim in (*(roads(root) if walk else ()), *rows(root)):
        print(f"{what:50}{value:22}{aim}".rstrip())
    print(f"\n{'package':20}{'files':>8}{'lines':>8}{'statements':>12}")
    for name, files, lines, statements in packages(root):
        print(f"{name:20}{files:8}{lines:8,}{statements:12,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", default=".", type=Path)
    parser.add_argument("--rev", help="count this commit instead of the working tree")
    parser.add_argument("--roads", action="store_true", help="walk the roads too")
    parser.add_argument("--check", action="store_true", help="fail where the gate would")
    given = parser.parse_args()
    root = given.root.resolve()
    if given.check:
        sys.exit("\n".join(complaints(root)) or None)
    if given.rev is None:
        return report(root, walk=given.roads)
    with tempfile.TemporaryDirectory() as folder:
        command = ["git", "-C", str(root), "archive", given.rev]
        archive = subprocess.run(command, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
            packed.extractall(folder, filter="data")
        report(Path(folder), walk=given.roads)


if __name__ == "__main__":
    main()
