"""Every text that bam prints or refuses with, gathered from its code: `tests/golden/messages.md`.

A value in a text is shown as `{name}`, and a choice of texts as `{one / another}`. A `part` is put
into another text, or goes to a function that prints it or refuses with it.
"""

import ast
import itertools
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
# Function -> the kind of a text that it is called with.
KINDS = {
    **dict.fromkeys(("Rule", "require", "bind", "_refuse"), "refuses"),
    **dict.fromkeys(("print", "say", "_say", "show", "table", "log", "_log", "on_event"), "prints"),
    **dict.fromkeys(("awaited", "compiling", "append", "extend"), "prints"),
    **dict.fromkeys(("warn", "warning"), "warns"),
}
# Functions whose texts are not for a reader: names, or what they look for in another text.
SEARCHES = {"partition", "rpartition", "removeprefix", "removesuffix", "startswith", "endswith"}
SEARCHES |= {"compile", "fullmatch", "match", "search", "split", "sub", "findall", "getLogger"}
# Help stands in docs/commands.md and docs/config.md, PRIVACY.md in other goldens.
HELP = {"Flag", "Command", "Key", "Part", "Clip", "Method"}
PAGES = {"bam/privacy/statement.py", "bam/release/report.py", "bam/release/charts.py"}
PAGES |= {"bam/sweep/plot.py"}
BEGIN, OR, END = "\ue000\ue001\ue002"  # of a value or of a choice, in a text
MARKS = str.maketrans({BEGIN: "{", OR: " / ", END: "}", "\n": "⏎"})


class Message(NamedTuple):
    """A text, in which `BEGIN`, `OR` and `END` mark values and choices."""

    file: str
    kind: str
    text: str

    def __str__(self):
        """The text as the table shows it."""
        return self.text.translate(MARKS)

    def patterns(self):
        """Yields regular expressions of its lines and choices, with a group for each value."""
        innermost, text = re.compile(f"{BEGIN}([^{BEGIN}{END}]*){END}"), self.text
        texts = []
        while match := innermost.search(text):
            texts += match[1].split(OR) if OR in match[1] else []
            text = text.replace(match[0], "\0")
        for line in "\n".join([text, *texts]).split("\n"):
            fixed = re.split(r"\0|\{.*?\}|%s", line)
            if any(map(str.strip, fixed)):
                yield "(.*?)".join(map(re.escape, fixed))


def _name(node):
    """A short name for the value of an expression."""
    match node:
        case ast.Call(func=ast.Name("plural" | "have"), args=[num, ast.Constant(noun)]):
            return f"{_name(num)} {noun}s"
        case ast.Call(args=[first, *_]) if (name := _name(first)) != "…":
            return name
        case ast.Name(id=name) | ast.Subscript(slice=ast.Constant(value=str(name))):
            return name
        case ast.Attribute(value=inner, attr="name" | "dtype" | "shape" as name):
            return f"{_name(inner)}.{name}"
        case ast.Call(func=ast.Attribute(value=ast.Name() as inner, attr="split" | "partition")):
            return _name(inner)
        case ast.Attribute(attr=name):
            return name
        case ast.Call(func=inner) | ast.Subscript(value=inner) | ast.UnaryOp(operand=inner):
            return _name(inner)
        case ast.BinOp(left=ast.Constant(), right=inner) | ast.BinOp(left=inner):
            return _name(inner)
    return "…"


def _kind(node):
    """Returns what a node makes of the texts below it.

    It returns "" if the node does not say.
    """
    if isinstance(node, ast.Call):
        return KINDS.get(_called(node), "refuses" * _called(node).endswith("Error"))
    return "refuses" * isinstance(node, ast.Raise) or "prints" * isinstance(node, ast.Yield)


def _called(node):
    """The name of the function that a call calls."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


class _Texts:
    """The texts of a module."""

    def __init__(self, tree):
        """Reads its constants."""
        self.taken = set()  # nodes that are part of a text
        self.constants = {
            node.targets[0].id: str(node.value.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        }

    def text(self, node):
        """Returns the text that an expression makes, or None if it makes none."""
        match node:
            case ast.Constant(value=str(text)):
                self.taken.add(node)
                return text
            case ast.Name(id=name):
                return self.constants.get(name)
            case ast.JoinedStr(values=nodes):
                self.taken.add(node)
                return "".join(map(self.put, nodes))
            case ast.FormattedValue(value=value):
                return self.put(value)
            case ast.BinOp(op=ast.Add(), left=one, right=other):
                between, nodes = "", (one, other)
            case ast.IfExp(body=one, orelse=other) | ast.BoolOp(op=ast.Or(), values=[one, other]):
                between, nodes = OR, (one, other)
            case ast.BoolOp(op=ast.And(), values=[_, one]) | ast.BinOp(op=ast.Mult(), left=one):
                between, nodes = OR, (one,)
            case _:
                return None
        if all(self.text(x) is None for x in nodes):
            return None
        self.taken.add(node)
        text = between.join([*map(self.put, nodes), *[""] * (len(nodes) == 1)])
        return f"{BEGIN}{text}{END}" if between else text

    def put(self, node):
        """An expression as a text has it."""
        text = self.text(node)
        return f"{BEGIN}{_name(node)}{END}" if text is None else text

    def below(self, node, kind):
        """Yields the texts below a node, each with its kind."""
        if isinstance(node, ast.expr) and node not in self.taken and (text := self.text(node)):
            yield kind, text
            kind = "part"
        inner, is_rule = list(ast.iter_child_nodes(node)), lambda x: _called(x) == "Rule"
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                inner = node.body
            case ast.AnnAssign() | ast.Subscript():
                inner = [node.value] if node.value else []
            case ast.Expr(value=ast.Constant()) | ast.Compare():  # a docstring; nothing to print
                inner = []
            case ast.Call() if _called(node) in SEARCHES | HELP:
                inner = [x for x in ast.walk(node) if isinstance(x, ast.Call) and is_rule(x)]
            case ast.Call() if is_rule(node):
                inner = [x for x in node.args if not isinstance(x, ast.Lambda)]
        for each in inner:
            yield from self.below(each, _kind(node) or kind)


def _is_for_readers(file, kind, text):
    """Whether it is no name, key or pattern, and not all values."""
    fixed = re.sub(f"{BEGIN}[^{BEGIN}{OR}{END}]*{END}", "\0", text)
    fixed = re.sub(f"[{BEGIN}{OR}{END}]", "", fixed)
    words = len(re.findall(r"[^\W\d_]{2,}", fixed))
    if kind == "part":
        return words > 1 and " " in fixed.strip() and "\\" not in fixed and file not in PAGES
    return words > 0 or ("\0" in fixed and re.search(r"[^\0\s]", fixed))


def messages_of(code, file):
    """The messages of a module, in its order, each once."""
    tree = ast.parse(code)
    rows = dict.fromkeys(_Texts(tree).below(tree, "part"))
    return [Message(file, *row) for row in rows if _is_for_readers(file, *row)]


def gathered():
    """The messages of all modules."""
    paths = {x.relative_to(ROOT).as_posix(): x for x in sorted(ROOT.glob("bam/**/*.py"))}
    texts = (messages_of(x.read_text(encoding="utf-8"), file) for file, x in paths.items())
    return list(itertools.chain.from_iterable(texts))


def table(messages):
    """Messages in Markdown."""
    lines = __doc__.rstrip().split("\n")
    for file, rows in itertools.groupby(messages, lambda x: x.file):
        lines += ["", f"## {file}", "", "| kind | text |", "|---|---|"]
        lines += [f"| {row.kind} | {str(row).replace('|', chr(92) + '|')} |" for row in rows]
    return "\n".join(lines) + "\n"
