"""Writes the completion of the command line for the fish shell, which the wheel has.

python tools/fish_completion.py > jaxpfl/cli/jaxpfl.fish
"""

from jaxpfl.cli import parser
from jaxpfl.cli.common import path

_CONFIGS = r"(jaxpfl configs 2>/dev/null | string replace -rf '^jaxpfl \S+ (\S+).*' '$1')"
_HEAD = """\
# Completes jaxpfl in fish: copy this file to ~/.config/fish/completions/jaxpfl.fish
# Made by tools/fish_completion.py.
"""


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", r"\\").replace("'", r"\'") + "'"


def script() -> str:
    """The commands, their options, the names of configs, and files where an argument is one."""
    lines = [_HEAD]
    # argparse has no public way to its commands.
    (commands,) = (each for each in parser()._actions if each.choices is not None)
    assert isinstance(commands.choices, dict)
    for name, command in commands.choices.items():
        about = _quoted(command.description or "")
        lines.append(f"complete -c jaxpfl -f -n __fish_use_subcommand -a {name} -d {about}")
        here = f"complete -c jaxpfl -n '__fish_seen_subcommand_from {name}'"
        actions = [each for each in command._actions if each.dest != "help"]
        if any(each.metavar == "CONFIG" and not each.option_strings for each in actions):
            lines.append(f"{here} -a {_quoted(_CONFIGS)}")
        for each in actions:
            if not each.option_strings:
                continue
            found = f"{here} -l {each.option_strings[0].lstrip('-')}"
            if each.choices is not None:
                found += f" -xa {_quoted(' '.join(map(str, each.choices)))}"
            elif each.nargs != 0:
                found += " -rF" if each.type is path else " -x"
            lines.append(f"{found} -d {_quoted((each.help or '').replace('%%', '%'))}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(script(), end="")
