# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""The table at the top of the page says of every recipe whether it needs the flag."""

import re

from recipes import FLAG, PAGE, recipes


def test_the_table_has_every_recipe_and_says_which_need_the_flag():
    rows = re.findall(r"^\| \[(.+)\]\(#(.+)\) \| (detected|flag) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    known = {heading: "flag" if FLAG in code else "detected" for heading, code in recipes().items()}
    assert {heading: word for heading, _, word in rows} == known
    for heading, anchor, _ in rows:
        assert anchor == re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")
