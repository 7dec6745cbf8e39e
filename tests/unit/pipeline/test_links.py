"""Links between stages: their names and rates, and the time of passes over them."""

from __future__ import annotations

import pytest

from edgeinfer.errors import UsageError
from edgeinfer.pipeline import LINKS, link_seconds, parse_link, pass_seconds


def test_links_have_names_and_rates() -> None:
    assert parse_link("1gbe") is LINKS["1GbE"] and parse_link(" TB4 ") is LINKS["tb4"]
    assert parse_link("50MB/s").bytes_per_s == 50e6 and parse_link("1.5 Gbit/s").bytes_per_s == 1.5e9 / 8
    assert all(parse_link(name) == link and link.seconds > 0 for name, link in LINKS.items())


@pytest.mark.parametrize("text", ["", "fast", "1Gb", "-1MB/s", "nanMB/s", "1e9B/s", "50MB/s;"])
def test_what_is_no_link_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="or a rate such as 50MB/s"):
        parse_link(text)
    with pytest.raises(UsageError, match="the rate must be above 0"):
        parse_link("0.0Gbit/s")


def test_the_first_stage_is_sent_ids_and_the_last_is_where_the_runner_is() -> None:
    link = LINKS["1GbE"]
    rows = 4 * 1024 * 10 / link.bytes_per_s
    assert [link_seconds(link, stage, 3, 10, 1024) for stage in range(3)] == pytest.approx(
        [2 * link.seconds + rows, 2 * link.seconds + 2 * rows, 0.0])


def test_the_slowest_stage_sets_the_pace_of_parts() -> None:
    assert pass_seconds([1.0, 3.0, 2.0], 1) == 6.0
    assert pass_seconds([1.0, 3.0, 2.0], 5) == 18.0
