"""docs/troubleshooting.md: every error text of the source has an entry there, and every entry is of a text that exists.

A new error without an entry fails here, with its place. An entry is a bullet that begins with texts in backticks, with
``…`` for what a message fills in; a text may be any part of the message that tells it from others.
"""

import ast
import functools
import itertools
import re

from helpers import ROOT

from idmm.cli import COMMANDS, Group
from idmm.config.schema import keys_of

PAGE = ROOT / "docs" / "troubleshooting.md"
ANY = "…"  # stands for what a message fills in
ERRORS = {"UserError", "RunError", "FieldError", "BadImage"}  # and their subclasses
LETTERS = 6  # that an entry's text has at least beside the key: less would cover anything


# ------------------------------------------------------------------ the texts of the source
class Texts(ast.NodeVisitor):
    """Collects the texts of errors in a module: what is given to an error's class, and other texts that begin with a
    key, as faults are collected in lists before they are raised; but for docstrings and what is logged."""

    def __init__(self, tree, errors, parted, key):
        self.errors, self.parted, self.key, self.found = errors, parted, key, []
        self.scopes = [_assigned(tree.body)]
        self.visit(tree)

    def visit_FunctionDef(self, node):
        self.scopes.append(_assigned(node.body))
        self.generic_visit(node)
        self.scopes.pop()

    def visit_Call(self, node):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        composed = ast.unparse(node.func) == "super().__init__"  # by an error of its parts
        given = node.args[1:2] if name in self.parted else node.args if composed or name in self.errors else []
        before = [f"{key}: " for key in self.expand(node.args[0])] if name == "FieldError" else [""]
        for part in given:
            inner = part.value if isinstance(part, ast.Starred) else part
            inner = inner.elt if isinstance(inner, ast.GeneratorExp) else inner
            self.found += [(part.lineno, first + text) for first in before for text in self.expand(inner)]
        if not (isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") in ("log", "warnings")):
            self.generic_visit(node)

    def visit_Constant(self, node):
        self._by_key(node)

    def visit_JoinedStr(self, node):
        self._by_key(node)

    def visit_Expr(self, node):
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.generic_visit(node)

    def _by_key(self, node):
        texts = self.expand(node)
        self.found += [(node.lineno, text) for text in texts if self.key.match(text) and not re.search("%[sdg]", text)]

    def expand(self, node, depth=3):
        """Returns the texts that an expression may have; names assigned nearby are filled in, all else is ANY."""
        if isinstance(node, ast.Constant):
            return [node.value] if isinstance(node.value, str) else [ANY]
        if isinstance(node, ast.FormattedValue | ast.NamedExpr):
            return self.expand(node.value, depth)
        if isinstance(node, ast.JoinedStr):
            parts = [self.expand(value, depth) for value in node.values]
            return ["".join(words) for words in itertools.islice(itertools.product(*parts), 64)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            both = self.expand(node.left, depth), self.expand(node.right, depth)
            return ["".join(words) for words in itertools.product(*both)]
        if isinstance(node, ast.IfExp):
            return self.expand(node.body, depth) + self.expand(node.orelse, depth)
        if isinstance(node, ast.BoolOp):
            return [text for value in node.values for text in self.expand(value, depth)]
        if isinstance(node, ast.Name) and depth:
            values = next((scope[node.id] for scope in reversed(self.scopes) if node.id in scope), [])
            return [text for value in values for text in self.expand(value, depth - 1)] or [ANY]
        return [ANY]


def _assigned(body):
    """The values that statements assign to each name, those of functions within left out."""
    values, todo = {}, list(body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        for target in getattr(node, "targets", [node.target] if isinstance(node, ast.NamedExpr) else []):
            both = isinstance(target, ast.Tuple) and isinstance(getattr(node, "value", None), ast.Tuple)
            for name, value in zip(target.elts, node.value.elts, strict=True) if both else [(target, node)]:
                if isinstance(name, ast.Name) and hasattr(node, "value"):
                    values.setdefault(name.id, []).append(value if both else node.value)
        todo += ast.iter_child_nodes(node)
    return values


def _configs(commands):
    for command in commands.values():
        yield from _configs(command.commands) if isinstance(command, Group) else [command.config]


def _letters(text):
    """Letters of a text beside the key that it begins with, and 'wanted', which most have."""
    return len(re.findall("[A-Za-z]", re.sub(r"^[-\w.]+: |wanted", "", text)))


@functools.cache
def texts():
    """All error texts of the package as {text: place}."""
    trees = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "idmm").rglob("*.py"))}
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    errors, parted, before = set(ERRORS), {"FieldError", "fault"}, 0  # the last is how lists collect theirs
    while before != len(errors):
        before = len(errors)
        errors |= {node.name for node in classes if {getattr(base, "id", "") for base in node.bases} & errors}
    for node in classes:
        if node.name in errors - ERRORS and any(getattr(item, "name", "") == "__init__" for item in node.body):
            parted.add(node.name)  # it is given parts: of which the second is the text
    keys = {key.key for kind in _configs(COMMANDS) for key in keys_of(kind) if "[]" not in key.key} | {"--config"}
    key = re.compile(rf"(?:{'|'.join(sorted(map(re.escape, keys), key=len, reverse=True))}): \S")
    found = {}
    for path, tree in trees.items():
        raised = errors | {"ValueError"} if path.parent.name == "config" else errors  # pydantic makes faults of them
        for line, text in Texts(tree, raised, parted, key).found:
            text = re.sub(rf"{ANY}+", ANY, " ".join(text.split()))
            if _letters(text) >= LETTERS:  # else all of it comes from elsewhere
                found.setdefault(text, f"{path.relative_to(ROOT)}:{line}")
    begun = sorted(found)  # a text that another one goes on from is a part of it
    return {text: found[text] for n, text in enumerate(begun) if not "".join(begun[n + 1 : n + 2]).startswith(text)}


# ------------------------------------------------------------------ the entries of the page
HEAD = r"(?:`[^`]+`(?:,\s+)?)+"  # one text or several, before the advice


@functools.cache
def entries():
    """The texts of the page's entries, each with its bullet."""
    bullets = re.findall(r"(?m)^- (`(?:[^\n]|\n  )+)", PAGE.read_text())
    heads = [re.match(HEAD, bullet)[0] for bullet in bullets]
    return {" ".join(text.split()): bullet for head, bullet in zip(heads, bullets, strict=True)
            for text in re.findall("`([^`]+)`", head)}  # fmt: skip


def pattern(entry):
    return re.compile(".*".join(re.escape(part) for part in entry.split(ANY)))


def test_every_error_has_an_entry():
    known = [pattern(entry) for entry in entries()]
    missing = [f"{place}: {text}" for text, place in texts().items() if not any(p.search(text) for p in known)]
    assert not missing, "docs/troubleshooting.md wants an entry (cause and cure) for:\n" + "\n".join(missing)


def test_texts_are_found():
    """The reader of the source itself: a raised text, one filled in from a name, a fault of a list, a key's check."""
    known = "\n".join(texts())
    for text in (
        "out: '…' holds a run already; --resume never wants a new folder",
        "data.folds: … folds want … training groups of each class",
        "out: missing; name a folder for all that the run writes (--out runs/a)",
        "got …, wanted auto, full or [low, high] with low < high",
        "data.root: … …; the archive may be half-unpacked",
    ):
        assert text in known
    assert len(texts()) > 200


GENERAL = ("got …, wanted", "missing; wanted: …")  # composed of pydantic's faults


def test_every_entry_is_of_a_text():
    """No entry of a text that is gone, none that would cover anything, none without advice."""
    sources = list(texts())
    for entry, bullet in entries().items():
        assert len(re.findall("[a-z]", entry)) >= LETTERS, entry
        assert any(word in entry for word in GENERAL) or any(map(pattern(entry).search, sources)), (
            f"of no error: {entry}"
        )
        assert re.match(HEAD + r":\s+\S", bullet), f"no advice: {entry}"
