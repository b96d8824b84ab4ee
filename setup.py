"""The package's description: the README, without its picture and its links into the repository."""

import re
from pathlib import Path

from setuptools import setup

readme = Path("README.md").read_text(encoding="utf-8")
PICTURE, LINK = r"!\[[^]]*\]\([^)]+\)\n", r"\[([^]]+)\]\((?!https?:)[^)]+\)"
setup(
    long_description=re.sub(f"{PICTURE}|{LINK}", r"\1", readme),
    long_description_content_type="text/markdown",
)
