"""The data sets that configs read: each is known, and the documentation says what the code does."""

import re
from pathlib import Path

import pytest

from jaxpfl.data.catalogue import data_sets, find
from jaxpfl.data.open import open as open_population
from jaxpfl.data.open import why_missing
from jaxpfl.errors import InputError
from jaxpfl.experiments.config import shipped

PAGE = Path(__file__).parents[2] / "docs" / "data_sets.md"


def test_every_source_of_a_config_is_of_a_data_set_and_every_data_set_but_one_is_read():
    read = [source for name in shipped.names() for source in shipped.sources(name)]
    for source in read:
        holders = [each.name for each in data_sets().values() if each.holds(source)]
        assert len(holders) == 1, f"{source} is of {holders}"
    idle = [each.name for each in data_sets().values() if not any(map(each.holds, read))]
    assert idle == ["text_shakespeare_roles"]


def test_the_documentation_has_the_same_table():
    expected = ["| name | clients | made of | licence | `jaxpfl data get` |"]
    expected.append("|---|---|---|---|---|")
    for name, each in data_sets().items():
        how = "fetches it" if each.downloads or each.hub else "says how" if each.variable else ""
        cells = [cell.replace("|", r"\|") for cell in (each.clients, each.origin)]  # of Markdown
        expected.append(f"| `{name}` | {' | '.join(cells)} | {each.licence} | {how} |")
    found = re.search(r"## All of them\n\n((?:\|.*\n)+)", PAGE.read_text("utf-8"))
    assert found is not None
    assert found[1].splitlines() == expected


def test_what_is_fetched_has_a_name_that_the_readers_know(tmp_path):
    for each in data_sets().values():
        for file, download in each.downloads.items():
            assert download.url.split("/")[-1].removesuffix(".lzma") == file
            assert file.endswith(".tar.bz2") or "no such file" in why_missing(str(tmp_path / file))
            if not file.endswith("overflow.sqlite"):
                assert re.fullmatch("[0-9a-f]{64}", download.sha256 or "")
        for source in each.sources.values():
            assert "hub" in why_missing(source.format(revision=40 * "a"))
        assert list(each.sources) == (each.files if each.hub else [])


def test_the_state_of_a_data_set_is_found_without_the_network(tmp_path, monkeypatch):
    for variable in {each.variable for each in data_sets().values() if each.variable}:
        monkeypatch.delenv(variable, raising=False)
    assert find("digits").state() == "embedded"
    assert "JAXPFL_TFF" in find("emnist").state()
    monkeypatch.setenv("JAXPFL_TFF", str(tmp_path))
    assert find("emnist").state() == "absent"
    (tmp_path / "emnist_all.sqlite").touch()
    assert find("emnist").state() == "here"
    (tmp_path / "stackoverflow.word_count.tar.bz2").touch()
    assert find("stackoverflow").state() == "1 of 2 files here"
    for given, nearest in (("emnits", "emnist"), ("nova", "nova")):
        with pytest.raises(InputError, match=f"did you mean .*{nearest}"):
            find(given)


@pytest.mark.parametrize("name", ["emnist_cnn", "fedc4", "irc_word_lm", "papers/popri_congress"])
def test_a_file_that_is_not_in_its_folder_is_refused_with_the_command(name, tmp_path, monkeypatch):
    for variable in {each.variable for each in data_sets().values() if each.variable}:
        monkeypatch.setenv(variable, str(tmp_path))
    source = next(each for each in shipped.sources(name) if each.startswith("$"))
    with pytest.raises(InputError, match="no such file; `jaxpfl data get ") as refused:
        open_population(source)
    named = re.search(r"jaxpfl data get (\w+)", str(refused.value))
    assert named is not None and find(named[1]).holds(source)
