"""The page of behaviours is current: it is made only if tests cite what the table has."""

import behaviours_page


def test_the_page_is_current() -> None:
    assert behaviours_page.PAGE.read_text() == behaviours_page.page(), (
        "run: python scripts/behaviours_page.py"
    )
