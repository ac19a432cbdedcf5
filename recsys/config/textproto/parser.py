"""Parses text into a message, and reports every mistake and the line of every field.

The parser descends recursively over tokens, guided by the message's descriptor. Nested blocks cannot exhaust
the stack: a loop skips the block of an unknown field, and known blocks are only as deep as the schema.
"""

import re
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from recsys.config import fields
from recsys.config.textproto.names import field_of
from recsys.config.textproto.scalars import Mistake, Token, convert, kind_of, quote

_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r\n\f\v]+|\#[^\n]*)
      | (?P<extension>\[[ \t]*[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+[ \t]*\])
      | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<number>\.?[0-9](?:[eE][+-]|[A-Za-z0-9_.])*)
      | (?P<string>"(?:[^"\\\n]|\\[^\n])*"|'(?:[^'\\\n]|\\[^\n])*')
      | (?P<mark>[{}<>\[\]:;,-])
      | (?P<bad>["'].*|.)""",
    re.VERBOSE,
)
_CLOSING = {"{": "}", "<": ">", "[": "]"}


class Parsed(NamedTuple):
    """The results of parsing a text, apart from the message that it fills.

    Attributes:
        findings: every mistake as `<place>: <mistake>`, in the order of the text.
        locations: `<file>:<line>` of each field that could be set, by a path such as `features[0].id.table`.
    """

    findings: list[str]
    locations: dict[str, str]


def parse(text: str, message: Message, file: str) -> Parsed:
    """Fills an empty `message` from `text`, which findings call `file`; fields with a mistake stay unset."""
    parser = _Parser(text, file, numbered=True)
    if parser.balanced():
        parser.message(message, "")
        parser.end()
    return Parsed(parser.findings, parser.locations)


def assign(text: str, message: Message, field: FieldDescriptor, path: str, where: str) -> Parsed:
    """Replaces one field of `message` by a value in text format.

    Quotes around a string are optional, and an empty text clears the field. `where` begins each finding.
    """
    for cleared in (field, *fields.rivals(message, field)) if text.strip() else (field,):
        fields.clear(message, cleared)
    if not text.strip():
        return Parsed([], {})
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING and text.lstrip()[0] not in "\"'[":
        text = quote(text)
    parser = _Parser(text, where, numbered=False)
    if parser.balanced():
        parser.value(message, field, path)
        parser.end()
    return Parsed(parser.findings, parser.locations)


class _Parser:
    """Walks the tokens of one text; findings name lines only if the text is `numbered`."""

    def __init__(self, text: str, name: str, numbered: bool):
        self.name, self.numbered = name, numbered
        self._findings: list[tuple[int, int, str]] = []
        self.locations: dict[str, str] = {}
        self.tokens: list[Token] = []
        self.index = 0
        self._tokenize(text)

    def _tokenize(self, text: str) -> None:
        line, line_start = 1, 0
        for match in _TOKEN.finditer(text):
            kind, token_text = str(match.lastgroup), match.group()
            token = Token(kind, token_text, line, match.start() - line_start + 1)
            if kind == "bad" and token_text[0] in "\"'":
                self._syntax(token, "a string that does not end on its line")
                self.tokens.append(token._replace(kind="string", text='""'))
            elif kind == "bad":
                self._syntax(token, f"unexpected {token_text!r}")
            elif kind != "blank":
                self.tokens.append(token)
            if "\n" in token_text:
                line += token_text.count("\n")
                line_start = match.start() + token_text.rfind("\n") + 1
        self.tokens.append(Token("end", "the end of the text", line, len(text) - line_start + 1))

    @property
    def findings(self) -> list[str]:
        """All findings so far, in the order of the text."""
        return [text for _, _, text in sorted(self._findings)]

    def balanced(self) -> bool:
        """Returns whether brackets match; if not, adds a finding about the first bracket that does not."""
        unclosed: list[Token] = []
        for token in self.tokens:
            if token.kind != "mark":
                continue
            if token.text in _CLOSING:
                unclosed.append(token)
            elif token.text in _CLOSING.values():
                if not unclosed:
                    self._syntax(token, f"{token.text!r} closes nothing")
                    return False
                opened = unclosed.pop()
                if _CLOSING[opened.text] != token.text:
                    self._syntax(token, f"{token.text!r} where {opened.text!r} of line {opened.line} is open")
                    return False
        if unclosed:
            self._syntax(unclosed[-1], f"{unclosed[-1].text!r} is never closed")
        return not unclosed

    def message(self, message: Message, path: str) -> None:
        """Reads fields up to the closing bracket or the end of the text."""
        seen: dict[str, Token] = {}
        while not self._closing() and self._peek().kind != "end":
            name = self._peek()
            if name.kind not in ("word", "extension"):
                self._syntax(name, f"expected the name of a field, found {name.text!r}")
                self._skip_line(name)
                continue
            self._next()
            written = "".join(name.text.split())
            field_path = f"{path}.{written}" if path else written
            try:
                field = field_of(message, written)
                _require_no_clash(message, field, seen)
            except Mistake as mistake:
                self._finding(name, field_path, str(mistake))
                self._skip_value(name)
            else:
                seen.setdefault(written, name)
                self._field(message, field, field_path, name)
            if self._peek().text in (",", ";"):
                self._next()

    def _field(self, message: Message, field: FieldDescriptor, path: str, name: Token) -> None:
        colon = self._peek().text == ":"
        if colon:
            self._next()
        elif field.message_type is None:
            self._finding(name, path, f"expected ':' and {kind_of(field)}")
            self._skip_value(name)
            return
        if not field.is_repeated:
            self.locations[path] = self._line(name)
        else:
            self.locations.setdefault(path, self._line(name))
        self.value(message, field, path)

    def value(self, message: Message, field: FieldDescriptor, path: str) -> None:
        """Reads one value, or, for a repeated field, a list in brackets."""
        if not (field.is_repeated and self._peek().text == "["):
            self._read_value(message, field, path)
            return
        self._next()
        while self._peek().text != "]":
            if not self._read_value(message, field, path):
                self._skip_to_comma()
            if self._peek().text == ",":
                comma = self._next()
                if self._peek().text == "]":
                    self._syntax(comma, "a comma after the last value of a list")
            elif self._peek().text != "]":
                self._finding(self._peek(), path, f"expected ',' or ']', found {self._peek().text!r}")
                self._skip_to_comma()
                if self._peek().text == ",":
                    self._next()
        self._next()

    def _read_value(self, message: Message, field: FieldDescriptor, path: str) -> bool:
        """Reads one value and sets or appends it; False if the current token cannot start a value."""
        if field.is_repeated:
            path = f"{path}[{len(getattr(message, field.name))}]"
        first = self._peek()
        self.locations[path] = self._line(first)
        if field.message_type is not None:
            if first.text not in ("{", "<"):
                self._finding(first, path, f"expected {kind_of(field)}, found {first.text!r}")
                self._skip_scalar()
                return False
            self._next()
            if field.is_repeated:
                inner = getattr(message, field.name).add()
            else:
                inner = fields.value_of(message, field)
                inner.SetInParent()
            self.message(inner, path)
            self._next()
            return True
        taken = self._scalar_tokens()
        if not taken:
            self._finding(first, path, f"expected {kind_of(field)}, found {first.text!r}")
            if first.text in _CLOSING:
                self._skip_block()
            return False
        try:
            _store(message, field, convert(field, taken))
        except Mistake as mistake:
            self._finding(first, path, str(mistake))
        return True

    def _scalar_tokens(self) -> list[Token]:
        """Takes the tokens of one scalar: an optional `-` and a number or word, or adjacent strings."""
        start = self.index
        if self._peek().text == "-":
            self._next()
        if self._peek().kind == "string":
            while self._peek().kind == "string":
                self._next()
        elif self._peek().kind in ("word", "number"):
            self._next()
        return self.tokens[start : self.index]

    def end(self) -> None:
        """Adds a finding if tokens are left."""
        if self._peek().kind != "end":
            self._syntax(self._peek(), f"unexpected {self._peek().text!r}")

    def _peek(self) -> Token:
        return self.tokens[self.index]

    def _next(self) -> Token:
        token = self.tokens[self.index]
        if token.kind != "end":
            self.index += 1
        return token

    def _closing(self) -> bool:
        token = self._peek()
        return token.kind == "mark" and token.text in _CLOSING.values()

    def _skip_value(self, name: Token) -> None:
        """Skips the value of a field that cannot be used."""
        if self._peek().text == ":":
            self._next()
        if self._peek().text in _CLOSING:
            self._skip_block()
        elif self._peek().line == name.line:
            self._skip_scalar()

    def _skip_scalar(self) -> None:
        if not self._scalar_tokens() and not self._closing() and self._peek().text not in _CLOSING:
            self._next()

    def _skip_block(self) -> None:
        """Skips an opening bracket and everything up to the matching closing bracket."""
        depth = 0
        while True:
            token = self._next()
            if token.kind == "mark":
                depth += (token.text in _CLOSING) - (token.text in _CLOSING.values())
            if depth == 0 or token.kind == "end":
                return

    def _skip_line(self, start: Token) -> None:
        while self._peek().line == start.line and self._peek().kind != "end" and not self._closing():
            self._skip_element()

    def _skip_to_comma(self) -> None:
        while self._peek().text not in (",", "]") and self._peek().kind != "end":
            self._skip_element()

    def _skip_element(self) -> None:
        if self._peek().kind == "mark" and self._peek().text in _CLOSING:
            self._skip_block()
        else:
            self._next()

    def _line(self, token: Token) -> str:
        return f"{self.name}:{token.line}" if self.numbered else self.name

    def _place(self, token: Token) -> str:
        return f"{self._line(token)}:{token.column}" if self.numbered else self.name

    def _finding(self, token: Token, path: str, problem: str) -> None:
        self.locations.pop(path, None)
        self._findings.append(
            (token.line, token.column, f"{self._line(token)}: {_cut(path)}: {_cut(problem)}")
        )

    def _syntax(self, token: Token, problem: str) -> None:
        self._findings.append((token.line, token.column, f"{self._place(token)}: {_cut(problem)}"))


def _require_no_clash(message: Message, field: FieldDescriptor, seen: dict[str, Token]) -> None:
    """Raises Mistake if the text has already set the field, or another field of the same choice."""
    name = fields.name_of(field)
    if name in seen and not field.is_repeated:
        raise Mistake(f"set twice, first in line {seen[name].line}; keep one")
    for rival in map(fields.name_of, fields.rivals(message, field)):
        if rival in seen:
            raise Mistake(f"only one of these may be set, but line {seen[rival].line} sets {rival}; keep one")


def _store(message: Message, field: FieldDescriptor, value: Any) -> None:
    if field.is_repeated:
        getattr(message, field.name).append(value)
    else:
        setattr(message, field.name, value)


def _cut(text: str) -> str:
    """Shortens words that only a damaged file has."""
    return re.sub(r"\S{200,}", lambda word: f"{word[0][:50]}... ({len(word[0]):,} characters)", text)
