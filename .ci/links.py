"""Fill in the links of a copy that is packaged: python .ci/links.py COPY [https://github.com/OWNER/NAME].

The README's relative links lead to this version's tag there, and setup.cfg gets the URLs of the package's page.
"""

import re
import sys
from configparser import ConfigParser
from pathlib import Path

copy, url = Path(sys.argv[1]), "".join(sys.argv[2:]).rstrip("/")
readme, setup = copy / "README.md", copy / "setup.cfg"
if not url:
    print("no REPOSITORY_URL: the package names no URL, and the README's links stay relative")
    sys.exit()
parser = ConfigParser()
parser.read(setup, encoding="utf-8")
tag = "v" + parser["metadata"]["version"]


def absolute(link: re.Match[str]) -> str:
    """A link that leads to the same place from any page."""
    target = f"README.md{link[1]}" if link[1].startswith("#") else link[1]
    view = "raw" if target.endswith((".jpg", ".png")) else "blob"
    return f"]({url}/{view}/{tag}/{target})"


text = readme.read_text(encoding="utf-8")
readme.write_text(re.sub(r"\]\((?!\w+:)([^)\s]+)\)", absolute, text), encoding="utf-8")
urls = f"""[metadata]
project_urls =
    Repository = {url}
    Documentation = {url}/blob/{tag}/docs/index.md
    Changelog = {url}/blob/{tag}/CHANGELOG.md
    Issues = {url}/issues
"""
setup.write_text(setup.read_text(encoding="utf-8").replace("[metadata]\n", urls, 1), encoding="utf-8")
