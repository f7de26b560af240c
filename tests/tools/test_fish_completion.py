"""The completion for fish that the wheel has is of the command line as it is."""

from pathlib import Path

import jaxpfl
from jaxpfl.cli import COMMANDS
from tools.fish_completion import script


def test_the_script_is_of_todays_commands():
    made = script()
    assert (Path(jaxpfl.__file__).parent / "cli" / "jaxpfl.fish").read_text("utf-8") == made
    for name in COMMANDS:
        assert f"-f -n __fish_use_subcommand -a {name} -d" in made
    assert "'__fish_seen_subcommand_from run' -l live -d" in made
