"""The documentation site builds without a warning, fetches nothing; its made pages are whole."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import jaxpfl
from tests.browser import CHROMIUM, seen
from tests.test_docs import keys_of
from tools import site_pages

ROOT = Path(__file__).parents[1]


def test_every_key_that_a_config_has_is_on_the_page_of_keys():
    page = site_pages.config_keys()
    # Names that the user chooses.
    named = {"candidates", "corpora"}
    for path in sorted((ROOT / "configs").rglob("*.yaml")):
        config = yaml.safe_load(path.read_text("utf-8"))
        if "base" in config:
            continue
        for section, value in config.items():
            inner = [key for key in keys_of(value) if section not in named]
            if isinstance(value, dict) and named & set(value):
                inner = list(value)
            for key in [section, *inner]:
                assert f"`{key}`\n:   " in page, f"{path.name}: {section}: {key}"


def test_a_key_has_its_type_its_default_and_what_it_means():
    page = site_pages.config_keys()
    assert "`rounds`\n:   whole number; required" in page
    assert "`clip_norm`\n:   number; default `0.3`\n\n    L2 bound of one client's update" in page
    assert "`sampling`\n:   `poisson` or `fixed` or `cyclic` or `min_separation` or " in page


def test_every_public_name_is_in_the_reference():
    pages = site_pages.pages()
    for name in jaxpfl.__all__:
        found = getattr(jaxpfl, name)
        if name in site_pages.MODULES:
            shown = pages[f"api/{name}.md"]
            # All that the module itself says is public.
            inner = getattr(found, "__all__", ())
            assert all(f"heading: jaxpfl.{name}.{each}\n" in shown for each in inner)
        else:
            shown = pages["api/jaxpfl.md"]
            assert f"jp.{name}](" in shown


@pytest.mark.long
def test_the_site_builds_without_a_warning_is_whole_and_fetches_nothing(tmp_path: Path):
    zensical = pytest.importorskip("zensical", reason="comes with the environment of `make test`")
    pytest.importorskip("mkdocstrings", reason="comes with the environment of `make test`")
    source, site = tmp_path / "build" / "site_pages", tmp_path / "build" / "site"
    site_pages.write(source)
    settings = (ROOT / "zensical.toml").read_text("utf-8").replace('["."]', f'["{ROOT}"]')
    (tmp_path / "zensical.toml").write_text(settings, "utf-8")
    finished = subprocess.run(
        [sys.executable, "-m", zensical.__name__, "build", "--strict"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    pages = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    written = [path.relative_to(source) for path in source.rglob("*.md")]
    assert pages - {Path("404")} == {path.with_suffix("") for path in written}
    for path in written:
        assert f'"{path.as_posix()}"' in settings, f"{path} is in no menu"
    # Docstrings are on the pages, and search has them without a server.
    assert "epsilon" in (site / "api" / "privacy.html").read_text("utf-8")
    assert "FedProx" in (site / "search.js").read_text("utf-8")
    for path in site.rglob("*.html"):
        html = path.read_text("utf-8")
        assert "offline_search.js" in html
        loaded = re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?(https?:[^\" >]*)", html
        )
        assert not loaded, f"{path.name} fetches {loaded}"
    if CHROMIUM:
        assert "FedProx" in seen(site / "index.html", "site")["text"]
    for path in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )[\"']?https?:", path.read_text("utf-8")), path.name
