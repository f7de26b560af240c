"""The completion for fish that the wheel has is of the command line as it is."""

from pathlib import Path

import jaxpfl
from tools.fish_completion import script


def test_the_script_is_of_todays_commands():
    assert (Path(jaxpfl.__file__).parent / "cli" / "jaxpfl.fish").read_text("utf-8") == script()
    assert "'__fish_seen_subcommand_from run' -l live -d" in script()
