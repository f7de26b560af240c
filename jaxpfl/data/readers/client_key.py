"""Which client a row belongs to, computed from one of its columns.

    url|domain          the host of a URL: https://www.example.org/a?b and http://WWW.example.org
                        are one client, www.example.org
    title|re:(\\w+)      the first group of a regular expression's first match in the value
    user|mod:1000       a hash of the value, modulo a number: at most 1,000 clients
    title|value         the value itself, a non-empty string or a whole number

As Dataset Grouper (Charles et al. 2023) partitions FedC4 and FedCCnews by domain. Errors name the
column and what was expected, and never a value.
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from jaxpfl.errors import InputError

RULES = ("domain", "re", "mod", "value")


@dataclass(frozen=True)
class ClientKey:
    """A rule that gives each row a client's id.

    Attributes:
      column: the column that the rule reads.
      rule: one of `RULES`.
      argument: the regular expression of "re", the number of "mod"; else "".
    """

    column: str
    rule: str = "value"
    argument: str = ""

    @classmethod
    def parse(cls, text: str, where: str) -> "ClientKey":
        """Reads COLUMN|RULE or COLUMN|RULE:ARGUMENT; a name without a rule is COLUMN|value.

        Args:
          where: begins messages, such as "source 'x': client".
        """
        column, given, rest = text.partition("|")
        rule, _, argument = rest.partition(":")
        if not given:
            rule = "value"
        if not column or rule not in RULES:
            raise InputError(
                f"{where} must be COLUMN|domain, COLUMN|re:PATTERN, COLUMN|mod:NUMBER or "
                f"COLUMN|value, found {text!r}"
            )
        if bool(argument) != (rule in ("re", "mod")):
            expected = "an argument after ':'" if rule in ("re", "mod") else "no argument"
            raise InputError(f"{where}: the rule {rule!r} takes {expected}, found {text!r}")
        if rule == "mod" and not (argument.isascii() and argument.isdecimal() and int(argument)):
            raise InputError(f"{where}: the rule 'mod' needs a positive number, found {argument!r}")
        if rule == "re":
            try:
                groups = re.compile(argument).groups
            except re.error as error:
                raise InputError(
                    f"{where}: not a valid regular expression: {argument!r}: {error}"
                ) from None
            if not groups:
                raise InputError(
                    f"{where}: the regular expression must have a group, whose match is the "
                    f"client, found {argument!r}"
                )
        return cls(column, rule, argument)

    def __call__(self, value: Any) -> str | None:
        """The client's id, or None for a value that the rule does not fit."""
        if type(value) is int and self.rule in ("mod", "value"):
            value = str(value)
        if type(value) is not str or not value:
            return None
        if self.rule == "domain":
            try:
                return urlsplit(value.strip()).hostname or None
            except ValueError:
                return None
        if self.rule == "re":
            found = re.search(self.argument, value)
            return None if found is None else found[1] or None
        if self.rule == "mod":
            digest = hashlib.blake2b(value.encode("utf-8", "replace"), digest_size=8).digest()
            return str(int.from_bytes(digest, "big") % int(self.argument))
        return value

    @property
    def expected(self) -> str:
        """What a value must be, for messages."""
        if self.rule == "domain":
            return "a URL with a host, such as https://example.org/page"
        if self.rule == "re":
            return f"a string in which {self.argument!r} matches and its first group is not empty"
        return "a non-empty string or a whole number"

    @property
    def unit(self) -> str:
        """What a client is, in words."""
        of = {
            "domain": f'the domain of "{self.column}"',
            "re": f'what {self.argument!r} finds in "{self.column}"',
            "mod": f'a hash of "{self.column}" modulo {self.argument}',
            "value": f'"{self.column}"',
        }
        return f"all rows with one value of {of[self.rule]}"
