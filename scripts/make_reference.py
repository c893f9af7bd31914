"""Write docs/cli.md, docs/config.md and docs/api.md from the commands, the config schema and the public names.

    python scripts/make_reference.py

What they say comes from the code's descriptions; tests/test_docs.py fails when a page is stale. The public names
are read from the source and not imported, since most of their modules load torch.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
import types
import typing
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from typer.models import ArgumentInfo, OptionInfo

import fedmtl
from fedmtl.cli.app import app, options
from fedmtl.config import Config
from fedmtl.config.file import config_schema
from fedmtl_studies.cli import commands as study_commands

ROOT = Path(__file__).parents[1]
WIDTH = 100
COLUMN = 22
# Short names of types that signatures use, and the modules that have them.
ALIASES = {
    "ConfigSource": "fedmtl.config.file",
    "Observer": "fedmtl.runs.event_lines",
    "OpenEngine": "fedmtl.experiment.run",
    "Row": "fedmtl.api",
    "ClientId": "fedmtl.federation.messages",
    "Weights": "fedmtl.sharing.plan",
    "Rows": "fedmtl.sharing.plan",
    "Parameters": "fedmtl.federation.guide",
    "Labels": "fedmtl.tasks.kinds.protocol",
    "Value": "fedmtl.tasks.kinds.protocol",
}
LIST: dict[str, Any] = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
NOTE = "<!-- Written by scripts/make_reference.py; change the code's descriptions, not this page. -->"
BOUNDS = {
    "exclusiveMinimum": ">", "gt": ">", "minimum": ">=", "ge": ">=",
    "exclusiveMaximum": "<", "lt": "<", "maximum": "<=", "le": "<=",
}  # fmt: skip
KINDS = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false", "null": "empty"}


def pages() -> dict[Path, str]:
    """Every generated page with its text."""
    return {
        ROOT / "docs/cli.md": cli_page(),
        ROOT / "docs/config.md": config_page(),
        ROOT / "docs/api.md": api_page(),
    }


def cli_page() -> str:
    """Every command with its arguments and options."""
    intro = [
        "# Commands",
        NOTE,
        str(app.info.help),
        _wrapped(
            "RUN is a run's name, looked up in `runs/`, or a run's folder. An error is one line on stderr;"
            " `--traceback` shows where it arose. Exit codes: 0 done; 2 bad config, command or input; 3 a run that"
            " could not go on; 130 and 143 ended by Ctrl-C and SIGTERM after the last whole round. `fedmtl"
            " --install-completion` sets up completion in the current shell."
        ),
        _text_block(f"fedmtl [OPTIONS] COMMAND ...\n\n{_entries(options)}"),
    ]
    return "\n\n".join([*intro, *(_command(name, function) for name, function in commands().items())]) + "\n"


def commands() -> dict[str, Callable[..., Any]]:
    """Every command with its function, those of a group as `study wire`."""
    found = _functions("", app) | {f"study {name}": function for name, function in study_commands().items()}
    for group in _groups():
        found |= _functions(f"{group.info.name} ", group)
    return found


def _functions(prefix: str, group: typer.Typer) -> dict[str, Callable[..., Any]]:
    return {
        prefix + command.callback.__name__: command.callback
        for command in group.registered_commands
        if command.callback is not None
    }


def _groups() -> list[typer.Typer]:
    return [group.typer_instance for group in app.registered_groups if group.typer_instance is not None]


def _command(name: str, function: Callable[..., Any]) -> str:
    arguments = " ".join(spelling for spelling, _ in _parameters(function) if not spelling.startswith("-"))
    has_options = any(spelling.startswith("-") for spelling, _ in _parameters(function))
    usage = " ".join(part for part in (f"fedmtl {name}", "[OPTIONS]" if has_options else "", arguments) if part)
    entries = _entries(function)
    block = f"{usage}\n\n{entries}" if entries else usage
    return f"## fedmtl {name}\n\n{inspect.getdoc(function)}\n\n{_text_block(block)}"


def _entries(function: Callable[..., Any]) -> str:
    lines: list[str] = []
    for spelling, words in _parameters(function):
        wrapped = textwrap.wrap(words, WIDTH - COLUMN - 2)
        lines.append(f"  {spelling:<{COLUMN - 1}} {wrapped[0]}".rstrip())
        lines += [" " * (COLUMN + 2) + line for line in wrapped[1:]]
    return "\n".join(lines)


def _parameters(function: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    """How each argument or option is written, and what it does; as declared, whatever click makes of it."""
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if parameter.annotation is typer.Context:
            continue
        assert typing.get_origin(parameter.annotation) is Annotated, f"{function.__name__}.{name} has no description"
        kind, info = typing.get_args(parameter.annotation)
        is_list, kind = _plain(kind)
        is_required = parameter.default is inspect.Parameter.empty
        if isinstance(info, ArgumentInfo):
            word = (info.metavar or name.upper()).strip("[]")
            spelling = f"{word}..." if is_list else word
            yield (spelling if is_required else f"[{spelling}]"), str(info.help)
        else:
            assert isinstance(info, OptionInfo)
            # In Annotated, the option's spelling is where a default would stand.
            option = info.default if isinstance(info.default, str) else f"--{name.replace('_', '-')}"
            repeated = " May be given several times." if is_list else ""
            yield f"{option} {info.metavar or _metavar(kind)}".strip(), f"{info.help}{repeated}"


def _plain(kind: Any) -> tuple[bool, Any]:
    """Whether it is a list, and the type without None and list around it."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        (kind,) = (member for member in typing.get_args(kind) if member is not type(None))
    is_list = typing.get_origin(kind) is list
    return is_list, typing.get_args(kind)[0] if is_list else kind


def _metavar(kind: Any) -> str:
    if kind is bool:
        return ""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "[" + "|".join(str(member.value) for member in kind) + "]"
    return "PATH" if kind is Path else "TEXT"


def _wrapped(words: str) -> str:
    return "\n".join(textwrap.wrap(words, 118, break_on_hyphens=False))


def _text_block(text: str) -> str:
    return f"```text\n{text}\n```"


def config_page() -> str:
    """Every key of a config, section by section."""
    schema = config_schema()
    intro = [
        "# The config",
        NOTE,
        _wrapped(
            "A config is a YAML file. Only `tasks` is required; every other key has the default shown here. `2e-5` is"
            " a number. `sst2:` with nothing behind it is a section with every default. An unknown key is an error."
            " Paths in a file are relative to the file; paths in `--set`, and `output`, are relative to the working"
            " directory. A key that a command does not honour is refused in `--set`, with what to write instead."
            " `fedmtl config FILE` prints a config with every default filled in, `fedmtl config --schema` the JSON"
            " schema."
        ),
    ]
    return "\n\n".join([*intro, *_sections(Config, schema, ())]) + "\n"


def _sections(section: type[BaseModel], schema: dict[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """A table of the section's keys, then the sections inside it."""
    described = schema if section is Config else schema["$defs"][section.__name__]
    rows: list[str] = []
    inner: list[tuple[tuple[str, ...], type[BaseModel]]] = []
    for name, field in section.model_fields.items():
        kind = described["properties"][name]
        below = _section_of(field.annotation)
        if below is not None:
            inner.append((((*path, name) if below[1] == "" else (*path, name, below[1])), below[0]))
        if below is None or below[1] or field.description:
            default = "required" if field.is_required() else _shown(field.get_default(call_default_factory=True))
            words = (field.description or "").replace("|", "\\|").replace("<", "&lt;")
            rows.append(f"| `{name}` | {_words(kind, schema)} | {default} | {words} |")
    title = f"`{'.'.join(path)}`" if path else "Top level"
    table = "\n".join(["| key | value | default | what it does |", "|---|---|---|---|", *rows])
    yield f"## {title}\n\n{table}"
    for where, below_section in inner:
        yield from _sections(below_section, schema, where)


def _section_of(annotation: Any) -> tuple[type[BaseModel], str] | None:
    """The section a key holds, and how the names between the key and it are written."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, ""
    if typing.get_origin(annotation) is dict:
        inner = _section_of(typing.get_args(annotation)[1])
        # A client's files are described where a task's are.
        return None if inner is None or inner[0].__name__ == "SourceConfig" else (inner[0], "<name>")
    for member in typing.get_args(annotation):
        if (found := _section_of(member)) is not None:
            return found
    return None


def _words(kind: dict[str, Any], schema: dict[str, Any]) -> str:
    """A JSON schema's type in words."""
    if "anyOf" in kind:
        return " or ".join(_words(member, schema) for member in kind["anyOf"])
    if "$ref" in kind:
        name = kind["$ref"].rpartition("/")[2]
        return "a [source](#tasksnamesource)" if name == "SourceConfig" else "a section"
    if "enum" in kind:
        return ", ".join(f"`{value}`" for value in kind["enum"])
    if "const" in kind:
        return f"`{kind['const']}`"
    if "prefixItems" in kind:
        return f"two values: {' and '.join(dict.fromkeys(_words(item, schema) for item in kind['prefixItems']))}"
    if kind.get("type") == "array":
        return f"list of {_words(kind['items'], schema)}"
    if kind.get("type") == "object":
        values = kind.get("additionalProperties")
        return f"names, each with {_words(values, schema)}" if isinstance(values, dict) else "names"
    bounds = [f"{sign} {kind[key]:g}" for key, sign in BOUNDS.items() if key in kind]
    return " ".join([KINDS.get(kind.get("type", ""), "value"), ", ".join(bounds)]).strip()


def _shown(value: Any) -> str:
    if value is None or value == {}:
        return "empty"
    if isinstance(value, BaseModel):
        return "below"
    if isinstance(value, tuple):
        value = list(value)
    text = json.dumps(value) if isinstance(value, list | bool) else f"{value:g}" if _is_number(value) else str(value)
    return f"`{text}`"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def api_page() -> str:
    """Every public name with its signature, what it says of itself, its fields and its methods."""
    intro = [
        "# The Python API",
        NOTE,
        _wrapped(
            "Every name here is imported from `fedmtl`: `from fedmtl import Run`. `import fedmtl` itself loads no"
            " numeric library; a name does when it is first used and needs one. What is not on this page may change"
            " from one version to the next. Errors a user may meet are FedmtlErrors with a message of one line."
        ),
    ]
    parts = [
        f"## {title}\n\n" + "\n\n".join(_public(name, module) for name, module in names.items())
        for title, names in fedmtl._SECTIONS.items()
    ]
    kinds = _text_block("\n".join(f"{name} = {_alias(name, module)}" for name, module in ALIASES.items()))
    return "\n\n".join([*intro, *parts, f"## Types in signatures\n\n{kinds}"]) + "\n"


def _public(name: str, module: str) -> str:
    node = _definition(name, module)
    if not isinstance(node, ast.ClassDef):
        return f"### {name}\n\n{_python_block(_signature(node, name))}\n\n{_prose(node, name)}"
    bases = [base for base in map(ast.unparse, node.bases) if base not in ("NamedTuple", "Protocol", "Section")]
    is_error = bool({"FedmtlError", "Exception"} & set(bases))
    start = None if is_error else _method(node, "__init__")
    head = f"class {name}({', '.join(bases)})" if bases else f"class {name}"
    lines = [
        head if start is None else _signature(start, name, skip=1),
        *(() if is_error or name == "Config" else _fields(node)),
    ]
    text = [f"### {name}", _python_block("\n".join(lines)), _prose(node, name)]
    if start is not None:
        text.append(_prose(start, f"{name}.__init__"))
    if name == "Config":
        text.append("Its sections and keys: [config.md](config.md).")
    members = "\n".join(_members(node))
    return "\n\n".join([*text, members] if members else text)


def _alias(name: str, module: str) -> str:
    """What a type's short name stands for."""
    for node in _source(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.unparse(node.value)
    raise AssertionError(f"{module} has no {name}")


def _source(module: str) -> ast.Module:
    path = ROOT / "src" / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _definition(name: str, module: str) -> ast.FunctionDef | ast.ClassDef:
    """Where a module defines a name; one that it only imports is looked up where that comes from."""
    for node in _source(module).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return _definition(name, str(node.module))
    raise AssertionError(f"{module} has no {name}")


def _method(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == name), None)


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """A record's fields as they are declared; a default that is made anew each time is shown as its maker's name."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.target.id[0] != "_":
            default = "" if each.value is None else f" = {_default(each.value)}"
            yield f"    {each.target.id}: {ast.unparse(each.annotation)}{default}"


def _default(value: ast.expr) -> str:
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        factory = next(word.value for word in value.keywords if word.arg == "default_factory")
        return f"{ast.unparse(factory)}()"
    return ast.unparse(value)


def _members(node: ast.ClassDef) -> Iterator[str]:
    """The public methods and properties of a class, each as a point of a list with what it says of itself."""
    for each in node.body:
        if not isinstance(each, ast.FunctionDef) or each.name.startswith("_"):
            continue
        marks = {ast.unparse(mark) for mark in each.decorator_list}
        # Of a method with several signatures the last has the words.
        if "overload" in marks:
            continue
        if marks & {"property", "cached_property"}:
            head = f"{each.name}: {ast.unparse(each.returns)}" if each.returns else each.name
        else:
            head = _call(each, each.name, skip=0 if "staticmethod" in marks else 1)
        words = ast.get_docstring(each)
        first, *more = [" ".join(part.split()) for part in (words or "").split("\n\n")]
        point = textwrap.fill(f"* `{head}`: {first}" if first else f"* `{head}`", 118, **LIST)
        yield "\n\n".join([point, *(textwrap.fill(part, 118, initial_indent="  ", **LIST) for part in more)])


def _signature(node: ast.FunctionDef, name: str, skip: int = 0) -> str:
    """A call as a reader writes it; one parameter a line where it is long."""
    line = _call(node, name, skip)
    if len(line) <= WIDTH:
        return line
    lines = "".join(f"    {part},\n" for part in _parts(node, skip))
    return f"{name}(\n{lines}){_returns(node)}"


def _call(node: ast.FunctionDef, name: str, skip: int) -> str:
    return f"{name}({', '.join(_parts(node, skip))}){_returns(node)}"


def _parts(node: ast.FunctionDef, skip: int) -> list[str]:
    """The parameters but for the first `skip`, which are `self`."""
    words = node.args
    given = [*words.posonlyargs, *words.args]
    defaults = [None] * (len(given) - len(words.defaults)) + list(words.defaults)
    parts = [_parameter(each, default) for each, default in zip(given, defaults, strict=True)][skip:]
    if words.kwonlyargs:
        parts.append("*")
        parts += [_parameter(each, value) for each, value in zip(words.kwonlyargs, words.kw_defaults, strict=True)]
    return parts


def _returns(node: ast.FunctionDef) -> str:
    return "" if node.returns is None or node.name == "__init__" else f" -> {ast.unparse(node.returns)}"


def _parameter(node: ast.arg, default: ast.expr | None) -> str:
    kind = "" if node.annotation is None else f": {ast.unparse(node.annotation)}"
    if default is None:
        return f"{node.arg}{kind}"
    # A function that does nothing says no more than that there is a default.
    return f"{node.arg}{kind} = {'...' if isinstance(default, ast.Lambda) else ast.unparse(default)}"


def _prose(node: ast.FunctionDef | ast.ClassDef, name: str) -> str:
    words = ast.get_docstring(node)
    assert words, f"{name} has no docstring"
    return "\n\n".join(_wrapped(" ".join(part.split())) for part in words.split("\n\n"))


def _python_block(text: str) -> str:
    return f"```python\n{text}\n```"


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
