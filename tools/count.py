"""Counts of the source tree: names, lines, statements, files, imports, tests.

Run: python tools/count.py [ROOT] [--rev COMMIT]. Statements do not depend on the line length, so
they compare revisions that were formatted differently. `--check` is part of the gate: src is no
longer than its ceiling in pyproject.toml, and no modules import one another in a circle.
"""

import argparse
import ast
import io
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
LOADED = (
    "import sys, malmoi.training.pretrain; print(sum(m.startswith('malmoi') for m in sys.modules))"
)


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
    ceiling: int = project["tool"]["malmoi"]["ceiling"]
    source = read(root, "src")
    if _lines(source) > ceiling:
        yield (
            f"src has {_lines(source):,} lines, more than its ceiling of {ceiling:,}: delete as "
            "many as were added."
        )
    if circle := module_circle(source):
        yield f"These modules import one another in a circle: {', '.join(circle)}."


def rooms(root: Path) -> tuple[int, int]:
    inside = list((root / "src/malmoi").iterdir())
    packages = [p for p in inside if (p / "__init__.py").exists()]
    modules = [p for p in inside if p.suffix == ".py" and not p.stem.startswith("__")]
    return len(packages), len(modules)


def loaded(root: Path) -> int:
    """Modules of ours that pre-training imports."""
    path = {"PYTHONPATH": str(root / "src")}
    done = subprocess.run([sys.executable, "-c", LOADED], env=path, capture_output=True, text=True)
    return int(done.stdout or 0)


def rows(root: Path) -> Iterator[tuple[str, str]]:
    source = read(root, "src")
    tests = read(root, "tests")
    files = [m for m in source if not m.trivial]
    lines = _lines(source)
    defined = Counter(name for m in source for name in set(m.public_names()))
    yield "public names defined in more than one file", str(sum(n > 1 for n in defined.values()))
    yield "one-word names of functions and classes", f"{one_word(source):.0%}"
    wide = sum(len(line) > WIDTH for m in source for line in m.lines)
    yield f"lines over {WIDTH} columns", f"{wide / lines:.1%}"
    packed = sum(m.packed() for m in source)
    yield "tuple-packed assignments per 1,000 lines", f"{1000 * packed / lines:.1f}"
    comments = 100 * sum(m.comments() for m in source) / lines
    docs = 100 * sum(m.docstring_lines() for m in source) / lines
    yield "comments / docstring lines per 100", f"{comments:.1f} / {docs:.1f}"
    short = sum(len(m.lines) < 100 for m in files) / len(files)
    yield "files; share under 100 lines", f"{len(files)}; {short:.0%}"
    yield "modules with one importer", str(single_importers(source))
    yield "packages + top-level modules", " + ".join(map(str, rooms(root)))
    yield "modules imported by pretrain", f"{loaded(root)} of {len(source)}"
    edges = package_edges([m for m in source if m.name != "malmoi"])
    yield "package-to-package edges; in a circle", f"{len(edges)}; {len(circular(edges))}"
    yield "lines / statements of source", f"{lines:,} / {sum(m.statements() for m in source):,}"
    yield "tests / source lines", f"{_lines(tests) / lines:.2f}"
    yield "monkeypatches", str(sum(m.text.count("monkeypatch.") for m in tests))


def packages(root: Path) -> Iterator[tuple[str, int, int, int]]:
    """Name, files, lines and statements of each package, the largest first."""
    found: dict[str, list[Module]] = defaultdict(list)
    for module in read(root, "src"):
        found[module.package].append(module)
    for name, modules in sorted(found.items(), key=lambda item: -_lines(item[1])):
        yield name, len(modules), _lines(modules), sum(m.statements() for m in modules)


def _lines(modules: list[Module]) -> int:
    return sum(len(m.lines) for m in modules)


def report(root: Path) -> None:
    for what, value in rows(root):
        print(f"{what:46}{value}")
    print(f"\n{'package':20}{'files':>8}{'lines':>8}{'statements':>12}")
    for name, files, lines, statements in packages(root):
        print(f"{name:20}{files:8}{lines:8,}{statements:12,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", default=".", type=Path)
    parser.add_argument("--rev", help="count this commit instead of the working tree")
    parser.add_argument("--check", action="store_true", help="fail where the gate would")
    given = parser.parse_args()
    root = given.root.resolve()
    if given.check:
        sys.exit("\n".join(complaints(root)) or None)
    if given.rev is None:
        return report(root)
    with tempfile.TemporaryDirectory() as folder:
        command = ["git", "-C", str(root), "archive", given.rev]
        archive = subprocess.run(command, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
            packed.extractall(folder, filter="data")
        report(Path(folder))


if __name__ == "__main__":
    main()
