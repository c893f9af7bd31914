"""YAML as people mean it: `2e-5` is a number, `no` is a word, and a key stands once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from fedmtl.errors import ConfigError

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


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text; a mistake is a ConfigError with `where` and the line."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_one_line(error, where)) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not YAML: {' '.join(str(error).split())}") from None


def write_yaml(value: Any) -> str:
    """YAML that `parse_yaml` and any other reader take for the same value; keys keep their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def _one_line(error: yaml.MarkedYAMLError, where: str) -> str:
    mark = error.problem_mark or error.context_mark
    line = f", line {mark.line + 1}" if mark else ""
    problem = error.problem or error.context or "cannot be read"
    if "alias" in f"{error.context} {problem}":
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
