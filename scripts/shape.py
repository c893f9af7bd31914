"""Print the shape of the source: files, lines, who imports whom, words that DESIGN.md retires, names used twice.

    python scripts/shape.py
    python scripts/shape.py --against HEAD~20     # the same figures of a commit beside ours
    python scripts/shape.py --words               # every retired word with file and line

The imports are those anywhere in a module, also in functions and for type checkers; a string that is exactly a module's
name (the tables of lazy imports) is one too. `__init__.py` files may import but are not counted as imported.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import statistics
import subprocess
import tarfile
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

WORDS = ("asked", "told", "held", "kept", "own", "place", "room", "taught", "turn", "thus", "length")
PLURALS = {f"{word}s": word for word in ("place", "room", "turn", "length")}
# A norm was called a length; a text has one by right. Only the first has one of these in its line.
ABOUT_NORMS = re.compile(r"norm|sqrt|squared?\b|cosine|clip", re.IGNORECASE)
KINDS = ("identifiers", "docstrings and comments", "other strings")
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
SLIVER = 40
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Hit(NamedTuple):
    """One retired word: where it stands, what kind of text that is, and the identifier or line around it."""

    file: str
    line: int
    kind: str
    word: str
    around: str


@dataclass(frozen=True)
class Module:
    """One source file, parsed; `file` is relative to the root, `nodes` are all of `tree`."""

    file: str
    lines: list[str]
    tree: ast.Module
    nodes: list[ast.AST]

    @property
    def is_init(self) -> bool:
        return self.file.endswith("__init__.py")

    @property
    def folder(self) -> str:
        return self.file.rpartition("/")[0] or "."

    @property
    def name(self) -> str:
        return self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def definitions(self) -> list[str]:
        return [node.name for node in self.tree.body if isinstance(node, DEFINITIONS)]


def read_modules(root: Path) -> list[Module]:
    """Every Python file under the root, in order of path."""
    modules = []
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text, filename=str(path))
        # Not `splitlines`: to Python a form feed ends no line.
        lines = text.removesuffix("\n").split("\n") if text else []
        modules.append(Module(path.relative_to(root).as_posix(), lines, tree, list(ast.walk(tree))))
    if not modules:
        raise ValueError("has no Python files")
    return modules


def find_importers(modules: Sequence[Module]) -> dict[str, set[str]]:
    """For every module, the names of the modules that import it."""
    names = {module.name for module in modules}
    importers: dict[str, set[str]] = {name: set() for name in names}
    for module in modules:
        for found in (_imports(module, names) & names) - {module.name}:
            importers[found].add(module.name)
    return importers


def _imports(module: Module, names: set[str]) -> set[str]:
    """The dotted names that a module imports; `from package import module` is that module, not the package."""
    found: set[str] = set()
    for node in module.nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                package = module.name.split(".") if module.is_init else module.name.split(".")[:-1]
                parts = package[: len(package) - node.level + 1]
                origin = ".".join([*parts, origin] if origin else parts)
            inner = {alias.name: f"{origin}.{alias.name}" for alias in node.names}
            found.update(full if full in names else origin for full in inner.values())
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def find_words(module: Module) -> Iterator[Hit]:
    """Every retired word of a module, as a whole word or as a part of an identifier."""
    docstrings = _docstrings(module)
    for node in module.nodes:
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                in_docstring = id(node) in docstrings
                for offset, line in enumerate(node.value.split("\n")):
                    # A newline of other strings is mostly an escape: only where they begin is known.
                    number = min(node.lineno + offset, node.end_lineno or 1) if in_docstring else node.lineno
                    yield from _hits(module, number, KINDS[1] if in_docstring else KINDS[2], line)
            continue
        for _, value in ast.iter_fields(node):
            for identifier in value if isinstance(value, list) else [value]:
                if isinstance(identifier, str):
                    yield from _hits(module, getattr(node, "lineno", 1), KINDS[0], identifier)
    text = "\n".join(module.lines) + "\n"
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from _hits(module, token.start[0], KINDS[1], token.string)


def _docstrings(module: Module) -> set[int]:
    """The ids of the nodes that are docstrings."""
    found = set()
    for node in module.nodes:
        if isinstance(node, (ast.Module, *DEFINITIONS)) and ast.get_docstring(node, clean=False) is not None:
            statement = node.body[0]
            assert isinstance(statement, ast.Expr)
            found.add(id(statement.value))
    return found


def _hits(module: Module, number: int, kind: str, text: str) -> Iterator[Hit]:
    for part in PART.findall(text):
        word = PLURALS.get(part.lower(), part.lower())
        if word in WORDS and (word != "length" or ABOUT_NORMS.search(text + module.lines[number - 1])):
            yield Hit(module.file, number, kind, word, text.strip()[:100])


def measure(modules: Sequence[Module]) -> dict[str, Any]:
    """All figures and lists of a tree, as JSON has them."""
    sizes = {module.file: len(module.lines) for module in modules}
    whole = [len(module.lines) for module in modules if not (module.is_init and len(module.lines) < 5)]
    lower, median, upper = statistics.quantiles(whole, n=4, method="inclusive")
    by_name = {module.name: module for module in modules}
    single = {
        name: by_name[next(iter(importers))]
        for name, importers in find_importers(modules).items()
        if len(importers) == 1 and not by_name[name].is_init
    }
    near = {name: importer for name, importer in single.items() if by_name[name].folder == importer.folder}
    slivers = sorted(name for name in near if len(by_name[name].lines) < SLIVER)
    folders: dict[str, dict[str, int]] = defaultdict(lambda: {"files": 0, "lines": 0})
    public: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        folders[module.folder]["files"] += 1
        folders[module.folder]["lines"] += len(module.lines)
        for name in dict.fromkeys(module.definitions):
            if not name.startswith("_"):
                public[name].append(module.name)
    duplicates = {name: found for name, found in sorted(public.items()) if len(found) > 1}
    one_definition = sorted(module.file for module in modules if len(module.definitions) == 1)
    hits = [hit for module in modules for hit in find_words(module)]
    return {
        "figures": {
            "Python files": len(modules),
            "lines": sum(sizes.values()),
            "median file": statistics.median(sizes.values()),
            "without small __init__: lower quartile": lower,
            "without small __init__: median": median,
            "without small __init__: upper quartile": upper,
            "modules with one importer": len(single),
            "of those in the same folder": len(near),
            f"of those under {SLIVER} lines": len(slivers),
            "files with one definition": len(one_definition),
            "public names in several modules": len(duplicates),
            **{f"retired words in {kind}": sum(hit.kind == kind for hit in hits) for kind in KINDS},
        },
        "folders": dict(sorted(folders.items())),
        "largest": dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0]))[:10]),
        "slivers": [{"module": n, "lines": len(by_name[n].lines), "importer": near[n].name} for n in slivers],
        "one definition": one_definition,
        "words": {kind: count_words(hit for hit in hits if hit.kind == kind) for kind in KINDS},
        "duplicates": dict(sorted(duplicates.items(), key=lambda item: -len(item[1]))),
        "hits": [hit._asdict() for hit in hits],
    }


def count_words(hits: Iterable[Hit]) -> dict[str, dict[str, Any]]:
    """How often each retired word occurs, and its five worst files."""
    files: dict[str, Counter[str]] = {word: Counter() for word in WORDS}
    for hit in hits:
        files[hit.word][hit.file] += 1
    return {word: {"count": found.total(), "worst": dict(found.most_common(5))} for word, found in files.items()}


def show(trees: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The figures as text, with columns for each tree; the lists are those of the last one."""
    columns, last = list(trees.values()), list(trees.values())[-1]
    yield from table(["", *trees], [[label, *(t["figures"][label] for t in columns)] for label in last["figures"]])
    folders = sorted({folder for tree in columns for folder in tree["folders"]})
    empty = {"files": 0, "lines": 0}
    yield from table(
        ["folder", *(f"{key} {name}" for name in trees for key in empty)],
        [[folder, *(t["folders"].get(folder, empty)[key] for t in columns for key in empty)] for folder in folders],
    )
    yield from table(["largest files", "lines"], list(last["largest"].items()))
    yield from table(
        [f"under {SLIVER} lines, imported once, from their folder", "lines", "importer"],
        [list(sliver.values()) for sliver in last["slivers"]],
    )
    for kind in KINDS:
        rows = []
        for word in WORDS:
            worst = ", ".join(f"{file} {count}" for file, count in last["words"][kind][word]["worst"].items())
            rows.append([word, *(tree["words"][kind][word]["count"] for tree in columns), worst])
        yield from table([f"retired words in {kind}", *trees, "worst files"], rows)
    yield from table(
        ["public in several modules", "", "modules"],
        [[name, len(modules), ", ".join(modules)] for name, modules in last["duplicates"].items()],
    )


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Lines of a table with an empty one behind it; numbers stand to the right."""
    cells = [[f"{cell:,g}" if isinstance(cell, int | float) else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    is_number = [any(not isinstance(row[i], str) for row in rows) for i in range(len(header))]
    for line in [header, *cells]:
        shown = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        )
        yield "  ".join(shown).rstrip()
    yield ""


def measure_commit(root: Path, commit: str) -> dict[str, Any]:
    """The figures of the root as a commit has it."""
    # In a subfolder, `git archive` archives that subfolder alone.
    done = subprocess.run(["git", "archive", "--format=tar", commit], cwd=root, capture_output=True, check=False)
    if done.returncode:
        raise ValueError(f"--against {commit}: {done.stderr.decode(errors='replace').strip()}")
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
        return measure(read_modules(Path(folder)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).parents[1] / "src"
    parser.add_argument("--root", type=Path, default=here, help="the folder with the packages (src of the repository)")
    parser.add_argument("--against", metavar="COMMIT", help="show the figures of a commit beside them")
    parser.add_argument("--words", action="store_true", help="list every retired word instead, with file and line")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures and lists as JSON")
    options = parser.parse_args()
    try:
        trees = {options.against: measure_commit(options.root, options.against)} if options.against else {}
        trees["here"] = measure(read_modules(options.root))
    except (OSError, SyntaxError, ValueError) as error:
        parser.error(f"{options.root}: {error}")
    if options.json:
        options.json.write_text(json.dumps(trees, indent=1), encoding="utf-8")
    if options.words:
        for hit in sorted(trees["here"]["hits"], key=lambda hit: (hit["word"], hit["kind"], hit["file"], hit["line"])):
            print(f"{options.root / hit['file']}:{hit['line']}: {hit['word']} ({hit['kind']}): {hit['around']}")
    else:
        print("\n".join(show(trees)))


if __name__ == "__main__":
    main()
