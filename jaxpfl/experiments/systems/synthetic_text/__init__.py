"""The study of synthetic text: how much private clients improve a downstream model."""

from pathlib import Path
from typing import Any

from jaxpfl.experiments.systems.base import ExportingSystem
from jaxpfl.experiments.systems.synthetic_text.config import SyntheticTextConfig


class SyntheticText(ExportingSystem):
    """The system; its runs have a corpus of synthetic texts."""

    def synthesize(
        self, directory: Path, out: Path, *, texts: int | None = None, progress: bool = True
    ) -> dict[str, Any]:
        from jaxpfl.experiments.systems.synthetic_text.synthesize import synthesize

        return synthesize(directory, out, texts=texts, progress=progress)


SYSTEM = SyntheticText("synthetic_text", SyntheticTextConfig, __name__)
