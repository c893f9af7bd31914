"""YAML as people mean it: `2e-5` is a number, `no` is a word, and a key stands once.

What a text may come to is bounded before anything is made of it: its length, its depth, and its values with every alias
written out, of which a kilobyte of YAML can hold billions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from fedmtl.errors import ConfigError

# A config of ten thousand clients is about a megabyte; the parser takes some seconds for as much.
LARGEST_TEXT = 2 << 20
MOST_VALUES = 100_000
DEEPEST = 64
# A seed has twenty digits; a number of thousands takes quadratic time to convert.
LONGEST_NUMBER = 64

_PREFIX = "tag:yaml.org,2002:"
_WORDS = {
    "null": re.compile(r"(?:~|null|Null|NULL|)\Z"),
    "bool": re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"),
    # A leading zero makes a word: a label `01` is not the number 1.
    "int": re.compile(r"[-+]?(?:0|[1-9][0-9_]*)\Z"),
    "float": re.compile(
        r"(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan)\Z"
    ),
    "merge": re.compile(r"<<\Z"),
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  # PyYAML's own name and shape
    num_values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        # Counted on the way: PyYAML takes seconds to read what would be refused in the end.
        self.num_values += 1
        if self.num_values > MOST_VALUES:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem=f"has more than {MOST_VALUES:,} values", problem_mark=mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        return node


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text; a mistake is a ConfigError with `where` and the line."""
    if len(text) > LARGEST_TEXT:
        raise ConfigError(f"{where}: has {len(text):,} letters; a config has at most {LARGEST_TEXT:,}")
    loader = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        _Measure().of(root, 1)
        return loader.construct_document(root)
    except RecursionError:
        raise ConfigError(f"{where}: is nested deeper than {DEEPEST}; write it flatter") from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_one_line(error, where)) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not YAML: {' '.join(str(error).split())}") from None
    finally:
        if loader is not None:
            loader.dispose()


class _Measure:
    """Counts the values of a document with its aliases written out, and checks every one of them on the way."""

    def __init__(self) -> None:
        self._counted: dict[int, tuple[int, int]] = {}
        self._open: set[int] = set()

    def of(self, node: yaml.Node, depth: int) -> tuple[int, int]:
        """How many values a node has, itself included, and how deep it is."""
        if id(node) in self._open:
            raise _problem(node, "an alias stands inside what it names; write the value out")
        if id(node) not in self._counted:
            self._open.add(id(node))
            self._counted[id(node)] = self._count(node, depth)
            self._open.remove(id(node))
        values, height = self._counted[id(node)]
        if depth + height > DEEPEST:
            raise _problem(node, f"is nested deeper than {DEEPEST}; write it flatter")
        if values > MOST_VALUES:
            raise _problem(node, f"has more than {MOST_VALUES:,} values once its aliases are written out")
        return values, height

    def _count(self, node: yaml.Node, depth: int) -> tuple[int, int]:
        if depth > DEEPEST:
            raise _problem(node, f"is nested deeper than {DEEPEST}; write it flatter")
        if isinstance(node, yaml.ScalarNode):
            _check_scalar(node)
            return 1, 0
        pairs = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
        kind = "seq" if isinstance(node, yaml.SequenceNode) else "map"
        if node.tag != _PREFIX + kind:
            raise _problem(node, f"the tag {node.tag} is not known here; leave it out")
        values, height = 1, 0
        for inner in pairs:
            more, below = self.of(inner, depth + 1)
            values, height = values + more, max(height, below + 1)
            if values > MOST_VALUES:
                raise _problem(node, f"has more than {MOST_VALUES:,} values once its aliases are written out")
        return values, height


def _check_scalar(node: yaml.ScalarNode) -> None:
    """Raise where a tag says what its value is not, where a number is endless, or where no file can hold the text."""
    kind = node.tag.removeprefix(_PREFIX)
    if kind != "str" and kind not in _WORDS:
        raise _problem(node, f"the tag {node.tag} is not known here; leave it out")
    if kind != "str" and not _WORDS[kind].match(node.value):
        raise _problem(node, f"the tag says {kind}, which the value is not; leave the tag out")
    if kind in ("int", "float") and len(node.value) > LONGEST_NUMBER:
        raise _problem(node, f"a number has {len(node.value):,} digits; {LONGEST_NUMBER} are the most")
    if not node.value.isascii() and any("\ud800" <= sign <= "\udfff" for sign in node.value):
        raise _problem(node, "a text has half a character in it, which no file can hold; write the whole one")


def _problem(node: yaml.Node, words: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=words, problem_mark=node.start_mark)


def write_yaml(value: Any) -> str:
    """YAML that `parse_yaml` and any other reader take for the same value; keys keep their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def _one_line(error: yaml.MarkedYAMLError, where: str) -> str:
    mark = error.problem_mark or error.context_mark
    line = f", line {mark.line + 1}" if mark else ""
    problem = error.problem or error.context or "cannot be read"
    if "undefined alias" in problem or "alias" in f"{error.context}":
        problem += '; a text that starts with * needs quotes, such as "*"'
    return f"{where}{line}: {' '.join(problem.split())}"


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        if key.value in seen:
            raise yaml.MarkedYAMLError(
                problem=f"the key `{key.value}` stands twice, first in line {seen[key.value]}; keep one",
                problem_mark=key.start_mark,
            )
        seen[key.value] = key.start_mark.line + 1
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


def _represent_list(dumper: _Dumper, values: Sequence[Any]) -> yaml.Node:
    is_flat = not any(isinstance(value, dict | list | tuple) for value in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=is_flat)


def _represent_text(dumper: _Dumper, text: str) -> yaml.Node:
    # Only double quotes bring every control character and line break back.
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)
for _name, _pattern in _WORDS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, None)
# The dumper keeps YAML 1.1's rules too, so that every reader sees a text where we wrote one.
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _WORDS["float"], None)
_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(list, _represent_list)
_Dumper.add_representer(tuple, _represent_list)
